"""Training of a recipe in one visible loop, with its checkpoints, metrics and baselines."""
