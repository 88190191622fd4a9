"""Random drawing of items with as few repetitions as possible."""
