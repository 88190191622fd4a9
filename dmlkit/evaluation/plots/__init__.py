"""Pictures of a run's similarities and retrieval; one kind per module."""
