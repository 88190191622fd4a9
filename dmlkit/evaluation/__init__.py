"""How well embeddings retrieve: figures, intervals, comparisons."""
