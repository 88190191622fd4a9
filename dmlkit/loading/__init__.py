"""Loading of datasets as batches; checks of datasets."""
