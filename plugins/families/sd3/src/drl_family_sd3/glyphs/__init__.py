"""The glyphs base model: a tiny Stable Diffusion 3 that learns to write four-letter words."""
