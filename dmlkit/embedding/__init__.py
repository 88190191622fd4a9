"""Embeddings: from a run's model and images to points, in memory or in a folder, and the search in them."""
