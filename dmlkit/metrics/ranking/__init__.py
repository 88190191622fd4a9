"""Search, and the ranks of the positives of each query."""
