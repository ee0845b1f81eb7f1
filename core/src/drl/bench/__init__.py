"""``drl bench``: a few iterations of a recipe, timed, with rewards that cost nothing."""
