"""Files of datasets: images, vectors and lists on disk."""
