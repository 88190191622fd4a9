"""One page that shows what a model gets right and wrong: ``dmlkit inspect``."""
