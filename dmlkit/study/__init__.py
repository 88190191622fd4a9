"""Studies: many trainings of recipes, and verdicts on the statements of a claim."""
