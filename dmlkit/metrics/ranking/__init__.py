"""Searching, and where the positives of a query rank."""
