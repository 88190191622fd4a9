"""HTTP server of a run, embeddings or a gallery, and its page: what ``dmlkit serve`` runs."""
