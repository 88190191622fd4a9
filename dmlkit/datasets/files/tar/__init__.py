"""Images in tar files: the place of each, and its bytes without unpacking."""
