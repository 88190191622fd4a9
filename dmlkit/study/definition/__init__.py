"""Definition of a study: its file, the methods that it compares, and the values that they are tuned over."""
