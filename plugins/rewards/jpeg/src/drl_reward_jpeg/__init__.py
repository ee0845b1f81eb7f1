"""Reward: how small the image is as a JPEG file."""
