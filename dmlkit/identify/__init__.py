"""Questions to embeddings: which images are similar, and which label an image has."""
