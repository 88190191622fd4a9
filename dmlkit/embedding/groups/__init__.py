"""Groups of images: near-duplicates and clusters."""
