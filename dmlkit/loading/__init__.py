"""Loading of datasets as batches; caches and checks of datasets."""
