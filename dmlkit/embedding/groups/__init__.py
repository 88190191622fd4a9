"""Which images belong together: near-duplicates, and clusters."""
