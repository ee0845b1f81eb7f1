"""Roles behind the loop: engines, rewards and trainer, as one process provides them."""
