"""Images and lists on disk."""
