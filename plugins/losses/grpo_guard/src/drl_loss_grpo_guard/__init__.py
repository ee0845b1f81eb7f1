"""GRPO-Guard's policy loss for drl."""
