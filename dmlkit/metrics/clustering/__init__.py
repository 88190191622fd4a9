"""K-means, and how clusters agree with classes."""
