"""Findings of a study: figures, intervals and verdicts of its runs."""
