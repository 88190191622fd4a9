"""Pretrained weights and what they need."""
