"""Models and embeddings in the formats of other programs."""
