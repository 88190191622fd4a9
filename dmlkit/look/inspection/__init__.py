"""The page of ``dmlkit inspect``, which shows the strengths and mistakes of a model."""
