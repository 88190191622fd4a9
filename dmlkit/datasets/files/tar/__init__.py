"""Images in tar files: where each lies, and its bytes without unpacking."""
