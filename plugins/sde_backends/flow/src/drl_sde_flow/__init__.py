"""Flow-SDE and ODE steps for drl."""
