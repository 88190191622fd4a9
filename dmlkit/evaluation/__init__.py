"""Evaluation of embeddings: retrieval metrics with intervals, comparisons, calibration and verification."""
