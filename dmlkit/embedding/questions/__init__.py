"""What people ask of embeddings: what is like this, and which of mine is it."""
