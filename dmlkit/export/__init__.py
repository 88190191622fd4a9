"""Export of models and embeddings to the formats of other programs."""
