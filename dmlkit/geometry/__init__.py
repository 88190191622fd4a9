"""The shape of embeddings: which curvature suits them, and pictures."""
