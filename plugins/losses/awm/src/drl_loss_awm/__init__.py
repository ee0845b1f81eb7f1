"""Advantage weighted matching for drl."""
