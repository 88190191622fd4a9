"""What a model gets wrong, and what labels do: the questions of ``dmlkit inspect``, one a module."""
