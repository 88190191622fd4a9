"""Runs of a study: their plan, and their training on this machine."""
