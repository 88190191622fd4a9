"""From a dataset to batches; a cache of decoded images, and a check of all of them."""
