"""Flow-matching supervised fine-tuning for drl."""
