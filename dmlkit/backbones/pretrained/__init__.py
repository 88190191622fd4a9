"""Pretrained weights: how to find, download, load and preprocess for them."""
