"""Shards, tar files in WebDataset's layout: their index, and images and labels by it."""
