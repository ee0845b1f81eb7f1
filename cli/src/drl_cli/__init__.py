"""The drl command."""
