"""The runs of a study: which ones there are, where they are trained, and their figures."""
