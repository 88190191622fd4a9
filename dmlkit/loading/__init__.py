"""Loading of datasets as batches; caches, shards and checks of datasets."""
