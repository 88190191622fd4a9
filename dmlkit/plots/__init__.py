"""Pictures of similarities, of retrieval, and of why two images are similar."""
