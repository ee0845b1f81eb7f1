"""Weight pushes to an engine in the trainer's own process."""
