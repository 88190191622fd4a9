"""Which images are similar, which label an image has and how sure that is, duplicates and clusters."""
