"""Flow-GRPO's clipped policy loss for drl."""
