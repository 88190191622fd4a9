"""The folder of a run: its file names, documents and checkpoints, and when its stored results may be reused."""
