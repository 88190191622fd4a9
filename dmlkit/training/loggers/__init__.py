"""Loggers that a run is shown in besides its own folder, which stays the truth: one module each."""
