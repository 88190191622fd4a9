"""Shards, which are tar files in WebDataset's layout: their index, and listings of images and labels."""
