"""Compare: several runs on the same queries, with intervals and paired tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fabric import Fabric
from torch import Tensor

from dmlkit.distributed.launch import start_fabric
from dmlkit.errors import UserError
from dmlkit.evaluation.report import Report
from dmlkit.evaluation.run import evaluate_run
from dmlkit.evaluation.significance import Comparison, paired_differences
from dmlkit.run_folder.folder import CheckpointName


@dataclass(frozen=True)
class Result:
    """The evaluation of one run.

    Args:
        name: of the run.
        report: of its test classes.
        per_query: (Q,) values by metric.
        note: why its stored evaluation could not be used, if so.
    """

    name: str
    report: Report
    per_query: dict[str, Tensor]
    note: str | None = None


def compare_runs(
    paths: Sequence[Path],
    *,
    checkpoint: CheckpointName | None = None,
    overrides: Sequence[str] = (),
    device: str = "auto",
    fabric: Fabric | None = None,
) -> tuple[list[Result], list[dict[str, Comparison]]]:
    """The test evaluation of each run, and how each differs from the first.

    A stored evaluation that answers the same question is read; where there is none, or it is damaged, the run is
    evaluated, and it is written.

    Args:
        paths: of the runs.
        checkpoint: which weights; by default the best, else the last.
        overrides: ``key=value`` each, for all runs; see `evaluate_run`.
        device: where, see `start_fabric`.
        fabric: a device and ranks that were launched already.

    Returns:
        results: one a run.
        differences: one a run after the first, by metric; none for a metric that only one of them has, nor where the
            runs were tested on different images.

    Raises:
        UserError: fewer than two runs, one given twice, or one that cannot be evaluated.
    """
    if len(paths) < 2:
        raise UserError(f"compare: expected at least two runs, got {len(paths)}")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("compare: a run is given twice")
    fabric = fabric or start_fabric(device)
    found = [
        evaluate_run(path, checkpoint=checkpoint, overrides=overrides, fabric=fabric, again=False) for path in paths
    ]
    results = [Result(str(path), run.report, run.per_query, run.note) for path, run in zip(paths, found, strict=True)]
    return results, [_differences(results[0], other) for other in results[1:]]


def _differences(first: Result, second: Result) -> dict[str, Comparison]:
    if first.report.images != second.report.images:
        return {}
    return paired_differences(first.per_query, second.per_query)
