"""Pictures of similarities, of retrieval and of the reliability of probabilities."""
