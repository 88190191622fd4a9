"""Evaluation of embeddings: retrieval metrics with intervals, comparisons, calibration and verification."""

from dmlkit.evaluation.arrays import evaluate_points
from dmlkit.evaluation.compare import compare_runs
from dmlkit.evaluation.run import evaluate_run

__all__ = ["compare_runs", "evaluate_points", "evaluate_run"]
