"""Compare: several runs on the same queries, with intervals and paired tests."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor

from dmlkit.embedding.trained import TrainedModel, load_model
from dmlkit.errors import UserError
from dmlkit.evaluation.evaluate import evaluate
from dmlkit.evaluation.result import save_evaluation
from dmlkit.evaluation.significance import Comparison, paired_comparison
from dmlkit.loading.cache import images_of_split
from dmlkit.run_folder import CheckpointName, RunFolder


@dataclass(frozen=True)
class Result:
    """The evaluation of one run.

    Args:
        name: of the run.
        report: what ``dmlkit eval`` prints as JSON.
        per_query: (Q,) values by metric.
    """

    name: str
    report: dict[str, Any]
    per_query: dict[str, Tensor]


def compare_runs(
    paths: list[Path], fabric: Fabric, *, checkpoint: CheckpointName | None = None
) -> tuple[list[Result], list[dict[str, Comparison]]]:
    """The test evaluation of each run, and how each differs from the first.

    Evaluations of the same weights are read from the run; otherwise the run is evaluated and they are written.

    Returns:
        results: one a run.
        differences: one a run after the first, by metric; empty where the runs were tested on different images.

    Raises:
        UserError: fewer than two runs, one given twice, or one that cannot be evaluated.
    """
    if len(paths) < 2:
        raise UserError(f"compare: expected at least two runs, got {len(paths)}")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("compare: a run is given twice")
    results = [_result(path, fabric, checkpoint) for path in paths]
    return results, [_differences(results[0], other) for other in results[1:]]


def _differences(first: Result, second: Result) -> dict[str, Comparison]:
    if first.report["images"] != second.report["images"]:
        return {}
    common = [name for name in first.per_query if name in second.per_query]
    return {name: paired_comparison(first.per_query[name], second.per_query[name]) for name in common}


def _result(path: Path, fabric: Fabric, checkpoint: CheckpointName | None) -> Result:
    run = RunFolder(path)
    trained = load_model(run, fabric, checkpoint)
    target = evaluation_path(path, "test", trained.checkpoint)
    report = _stored(target, trained)
    if report is None:
        dataset = images_of_split(trained.recipe.dataset, "test")
        evaluation = evaluate(fabric, trained.model, dataset, trained.recipe, split="test")
        report = save_evaluation(target, evaluation, trained, "test", trained.recipe.dataset.model_dump(mode="json"))
    with np.load(target.with_suffix(".npz"), allow_pickle=False) as arrays:
        per_query = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    return Result(str(path), report, per_query)


def _stored(target: Path, trained: TrainedModel) -> dict[str, Any] | None:
    """The report of these weights with the run's own recipe, if there is one."""
    if not target.exists() or not target.with_suffix(".npz").exists():
        return None
    report: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    wanted = [name for metric in trained.recipe.metrics for name in metric.names()]
    is_same = (
        report.get("model") == trained.model.fingerprint()
        and report["dataset"] == trained.recipe.dataset.model_dump(mode="json")
        and report["ties"] == "expected"
        and list(report["metrics"]) == wanted
    )
    return report if is_same else None


def evaluation_path(run: Path, name: str, checkpoint: CheckpointName) -> Path:
    """Where the report of an evaluation lies; the values of its queries lie beside it as ``.npz``."""
    return run / "evaluations" / f"{name}-{checkpoint}.json"
