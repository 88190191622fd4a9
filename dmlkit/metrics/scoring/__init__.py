"""All metrics of a set of embeddings or of hit lists."""
