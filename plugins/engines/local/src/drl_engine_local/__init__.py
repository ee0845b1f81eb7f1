"""Embedded rollout engine for drl, in the trainer's process."""
