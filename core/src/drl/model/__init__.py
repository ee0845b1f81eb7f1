"""The trainer's half: build components, take optimizer steps, write and read training state."""
