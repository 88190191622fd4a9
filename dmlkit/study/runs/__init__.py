"""Runs of a study: their plan, and their training on this machine or on a Ray cluster."""
