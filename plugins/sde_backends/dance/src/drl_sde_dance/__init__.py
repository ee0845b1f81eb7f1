"""Constant-noise (DanceGRPO) steps for drl."""
