"""One module per stage of an iteration; ``drl.loop`` calls them in order."""
