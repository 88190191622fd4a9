"""Crops and how they are drawn."""
