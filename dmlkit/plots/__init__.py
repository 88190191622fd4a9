"""Pictures of similarities, of retrieval, of maps of points, and of why two images are similar."""
