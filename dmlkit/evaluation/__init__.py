"""How well embeddings retrieve: figures, intervals, comparisons."""

from dmlkit.evaluation.arrays import evaluate_arrays, evaluate_folder
from dmlkit.evaluation.compare import compare_runs
from dmlkit.evaluation.run import evaluate_run

__all__ = ["compare_runs", "evaluate_arrays", "evaluate_folder", "evaluate_run"]
