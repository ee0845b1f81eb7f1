"""``drl align``: how far an engine and the trainer are apart on the same weights, and why.

``probe`` samples and measures, ``measure`` scores recorded steps, ``changes`` scores them once more with
one thing changed at a time, ``show`` writes the result.
"""
