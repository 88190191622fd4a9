"""Pictures of how a run's model retrieves, one kind a module."""
