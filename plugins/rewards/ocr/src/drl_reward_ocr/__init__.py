"""Reward: how much of the wanted text can be read in the image."""
