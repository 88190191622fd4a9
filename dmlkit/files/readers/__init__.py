"""Readers of files and folders that list images: one module per format."""
