"""Compare: several runs on the same queries, with intervals and paired tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lightning_fabric import Fabric
from torch import Tensor

from dmlkit.distributed.launch import start_fabric
from dmlkit.errors import UserError
from dmlkit.evaluation.report import Figures, Report, stored_answer
from dmlkit.evaluation.run import EvaluatedRun, evaluate_run
from dmlkit.evaluation.statistics import Comparison, Unit, bootstrap_intervals, holm, paired_differences, told_few
from dmlkit.run_folder.folder import CheckpointName, RunFolder


@dataclass(frozen=True)
class Result:
    """The evaluation of one run.

    Args:
        name: of the run.
        report: of its test classes.
        per_query: (Q,) values by metric.
        classes: (Q,) int64, of the queries; None where they are compared one by one.
        selected_by: the metric that chooses the run's checkpoints.
        notes: why what is stored could not be used, if so.
        untouched: figures of the run's backbone before training, where it has them for the same question.
        gains: by metric, how the run differs from them.
    """

    name: str
    report: Report
    per_query: dict[str, Tensor]
    classes: Tensor | None
    selected_by: str
    notes: tuple[str, ...] = ()
    untouched: Figures | None = None
    gains: dict[str, Comparison] = field(default_factory=dict[str, Comparison])


def compare_runs(
    paths: Sequence[Path],
    *,
    checkpoint: CheckpointName | None = None,
    overrides: Sequence[str] = (),
    by: Unit = "classes",
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
        by: what intervals and p-values draw; queries as if a class did not make its own alike.
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
    results = [_result(path, run, by) for path, run in zip(paths, found, strict=True)]
    return results, [_differences(results[0], other) for other in results[1:]]


def _result(path: Path, run: EvaluatedRun, by: Unit) -> Result:
    folder, notes, untouched = RunFolder(path), [run.note] if run.note else [], None
    question, file = run.report.question, RunFolder(path).untouched / f"{run.report.split}.json"
    try:
        stored = Report.read(file).question if file.exists() else None
        if stored and question:
            asked = question.model_copy(update={"weights": stored.weights, "checkpoint": "untouched"})
            untouched = stored_answer(file, asked)
            if untouched is None:
                notes.append(f"{path}: its untouched figures answer another question (dataset, transform or metrics)")
    except UserError as error:
        notes.append(f"{error}; left out here, train --resume scores them again")
    same = untouched is not None and untouched.report.images == run.report.images
    classes = run.classes if by == "classes" else None
    gains = paired_differences(untouched.per_query, run.per_query, classes) if untouched and same else {}
    if by == "classes" and (few := told_few(len(run.classes.unique()))):
        notes.append(few)
    report, selected_by = run.report, folder.recipe().training.select_by
    if by == "queries":
        report = _by_queries(Figures(report, run.per_query, run.classes))
        untouched = untouched and untouched._replace(report=_by_queries(untouched))
    return Result(str(path), report, run.per_query, classes, selected_by, tuple(notes), untouched, gains)


def _by_queries(figures: Figures) -> Report:
    """A report, whose intervals are over classes, with those over queries."""
    report, per_query, classes = figures
    intervals = {name: interval.ends for name, interval in bootstrap_intervals(per_query, None).items()}
    notes = tuple(note for note in report.notes if note != told_few(len(classes.unique())))
    return report.model_copy(update={"intervals": intervals, "intervals_by": "queries", "notes": notes})


class Line(NamedTuple):
    """A model of a table: a run, or what runs began with.

    Args:
        name: short, other than those of the other lines.
        report: of its test classes.
        changes: by metric, how it differs from the first run.
        corrected: their p-values, corrected for the number of all changes in the table; see `holm`.
    """

    name: str
    report: Report
    changes: dict[str, Comparison]
    corrected: dict[str, float]


def lines_of(
    results: Sequence[Result], differences: Sequence[dict[str, Comparison]], width: int | None = None
) -> list[Line]:
    """The runs, and after them their backbones before training, each once, however many runs began with it.

    Args:
        results, differences: of `compare_runs`.
        width: characters of a run's name at most, where its names can be cut to that.
    """
    names = short_names([result.name for result in results], width)
    rows = list(zip(names, [one.report for one in results], [{}, *differences], strict=True))
    begun_with: dict[str, list[tuple[str, Figures]]] = {}
    for name, result in zip(names, results, strict=True):
        if result.untouched and result.untouched.report.question:
            begun_with.setdefault(result.untouched.report.question.key(), []).append((name, result.untouched))
    first = results[0]
    for sharing in begun_with.values():
        report, per_query, _ = sharing[0][1]
        whose = "" if len(sharing) == len(results) else f" ({', '.join(name for name, _ in sharing)})"
        same = report.images == first.report.images
        changes = paired_differences(first.per_query, per_query, first.classes) if same else {}
        rows.append((f"untouched{whose}", report, changes))
    corrected = iter(holm([change.p_value for *_, changes in rows for change in changes.values()]))
    return [Line(*row, {name: next(corrected) for name in row[2]}) for row in rows]


def _differences(first: Result, second: Result) -> dict[str, Comparison]:
    if first.report.images != second.report.images:
        return {}
    return paired_differences(first.per_query, second.per_query, first.classes)


LEFT_OUT = "..."
BETWEEN_WORDS = "/_-. "


def short_names(names: Sequence[str], width: int | None = None) -> list[str]:
    """The ends of paths, as many folders of each as tell all apart; cut where longer than ``width``, see `cut_names`.

    Example:
        >>> short_names(["runs/birds/seed-0", "runs/birds/seed-1"]), short_names(["runs/a/seed-0", "runs/b/seed-0"])
        (['seed-0', 'seed-1'], ['a/seed-0', 'b/seed-0'])
    """
    parts = [Path(name).parts or (name,) for name in names]
    depths = range(1, max(map(len, parts)) + 1)
    ends = ([str(Path(*own[-depth:])) for own in parts] for depth in depths)
    short = next((tails for tails in ends if len(set(tails)) == len(tails)), list(names))
    return short if width is None else cut_names(short, width)


def cut_names(names: Sequence[str], width: int) -> list[str]:
    """Names of at most ``width`` characters, still apart: without the words that all begin with, then without middles.

    Where that cannot be, they stay as they are.

    Example:
        >>> cut_names(["grocery_tuned_mpa", "grocery_tuned_isa"], 12), cut_names(["a" * 20 + "1", "a" * 20 + "2"], 8)
        (['mpa', 'isa'], ['aa...aa1', 'aa...aa2'])
    """
    if max(map(len, names)) <= width:
        return list(names)
    columns = enumerate(zip(*names, strict=False))
    shared = next((place for place, letters in columns if len(set(letters)) > 1), min(map(len, names)))
    words = 1 + max(names[0].rfind(mark, 0, shared) for mark in BETWEEN_WORDS)
    own = [name[words:] for name in names]
    kept = width - len(LEFT_OUT)
    for head in sorted(range(kept + 1), key=lambda head: abs(head - kept // 2)):
        cut = [name if len(name) <= width else _without_middle(name, head, kept - head) for name in own]
        if len(set(cut)) == len(cut) and all(cut):
            return cut
    return list(names)


def _without_middle(name: str, head: int, tail: int) -> str:
    return f"{name[:head]}{LEFT_OUT}{name[len(name) - tail :]}"
