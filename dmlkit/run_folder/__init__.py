"""The folder of a run: its names, its documents, its checkpoints, and what may be used again."""
