"""Studies: a recipe trained many times, and what that says about a claim."""
