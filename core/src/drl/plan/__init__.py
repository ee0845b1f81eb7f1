"""What a recipe will need, before anything of it is loaded: memory by phase, work, seconds, advice.

``predict.predict`` is the whole of it; ``rates`` holds what was measured on cards, ``record`` adds to that
what a run has shown. Nothing here reads a weight: modules live on the meta device.
"""
