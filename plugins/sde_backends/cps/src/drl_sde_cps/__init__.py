"""Coefficients-preserving sampling steps for drl."""
