"""Comparison of several runs on the same queries, with intervals, paired tests, and their tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.evaluation.report import Figures, Report, stored_answer
from dmlkit.evaluation.run import EvaluatedRun, Scope, evaluate_scope
from dmlkit.files.escape import Rows, command_word
from dmlkit.files.pictures import distinct_tails, shortened_apart
from dmlkit.metrics.statistics import Comparison, Unit, bootstrap_intervals, few_classes_note, holm, paired_differences
from dmlkit.run_folder.folder import CheckpointName, RunFolder


@dataclass(frozen=True)
class Result:
    """Evaluation of one run on its test classes."""

    name: str
    report: Report
    per_query: dict[str, Tensor]  # (Q,) values by metric
    classes: Tensor | None  # (Q,) int64, of the queries; None if single queries are the units of the tests
    selected_by: str  # metric that chooses the run's checkpoints
    epochs: int  # of its recipe
    notes: tuple[str, ...]  # why stored metrics could not be used, if so
    pretrained: Figures | None  # of that checkpoint, if they are stored for the same question
    gains: dict[str, Comparison]  # over that checkpoint, by metric
    missing: str | None  # why that checkpoint is left out, if so
    changes: dict[str, Comparison]  # from the first run, by metric


def compare_runs(
    paths: Sequence[Path],
    *,
    checkpoint: CheckpointName | None = None,
    overrides: Sequence[str] = (),
    by: Unit = "classes",
    ranks: Ranks,
) -> list[Result]:
    """Evaluate runs on their test classes, and compare each run with the first.

    A stored evaluation that answers the same question is read. If there is none, or it is damaged, the run is
    evaluated and the evaluation is stored. Runs that were tested on different images have no differences.

    Args:
        checkpoint: the checkpoint; by default the best, or the last if there is no best.
        overrides: ``key=value`` each, for all runs; see `Scope`.
        by: the units that intervals and p-values draw; ``queries`` assumes that queries of a class are independent.
    """
    if len(paths) < 2:
        raise UserError(f"compare: expected at least two runs, got {len(paths)}")
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("compare: got the same run twice; remove one of them")
    scope = Scope(overrides=overrides)
    evaluated = [evaluate_scope(path, ranks, scope, checkpoint=checkpoint, keep=True) for path in paths]
    first, *others = (result_of(path, run, by, overrides) for path, run in zip(paths, evaluated, strict=True))
    results = [first]
    for other in others:
        is_same = other.report.images == first.report.images
        changes = paired_differences(first.per_query, other.per_query, first.classes) if is_same else {}
        results.append(replace(other, changes=changes))
    return results


def result_of(path: Path, run: EvaluatedRun, by: Unit = "classes", overrides: Sequence[str] = ()) -> Result:
    """Return the evaluation of a run with that of its pretrained checkpoint, if there is one for the same question."""
    folder, notes, pretrained, missing = RunFolder(path), [run.note] if run.note else [], None, None
    question, file = run.report.question, folder.evaluations / f"{run.report.split}-pretrained.json"
    again = f"dmlkit eval {command_word(path)} --checkpoint pretrained"
    again += "".join(f" --set {command_word(override)}" for override in overrides)
    try:
        stored = Report.read(file).question if run.checkpoint != "pretrained" and file.exists() else None
        if stored and question:
            same = question.model_copy(update={"weights": stored.weights, "checkpoint": "pretrained"})
            pretrained = stored_answer(folder.evaluations / f"{same.file_name(stored)}.json", same)
            if pretrained is None:
                notes.append(f"{path}: its pretrained checkpoint was not evaluated like this; for that: {again}")
    except UserError as error:
        missing = f"{error}; its pretrained checkpoint is left out here; evaluate it again with {again}"
    if pretrained and not run.report.has_files_of(pretrained.report):
        missing = f"{path}: photos have changed since it was trained, so its pretrained checkpoint is left out"
        pretrained = None
    elif pretrained and pretrained.report.images != run.report.images:
        missing = f"{path}: its images have changed since training, so its pretrained checkpoint is left out"
        pretrained = None
    notes += [missing] if missing else []
    classes = run.classes if by == "classes" else None
    gains = paired_differences(pretrained.per_query, run.per_query, classes) if pretrained else {}
    if by == "classes" and (class_note := few_classes_note(len(run.classes.unique()))):
        notes.append(class_note)
    report, training = run.report, folder.recipe().training
    if by == "queries":
        report = _by_queries(report, run.per_query, run.classes)
        pretrained = pretrained and pretrained._replace(report=_by_queries(*pretrained))
    chosen = training.select_by, training.trained_epochs
    return Result(str(path), report, run.per_query, classes, *chosen, tuple(notes), pretrained, gains, missing, {})


def _by_queries(report: Report, per_query: Mapping[str, Tensor], classes: Tensor) -> Report:
    """Replace the intervals over classes in a report by intervals over queries."""
    intervals = {name: interval.ends for name, interval in bootstrap_intervals(per_query, None).items()}
    notes = tuple(note for note in report.notes if note != few_classes_note(len(classes.unique())))
    return report.model_copy(update={"intervals": intervals, "intervals_by": "queries", "notes": notes})


NO_GAIN = 0.005  # a difference that nobody would notice: one more of 200 queries
ADVICE = "another backbone.tuning or more classes, see docs/tuning.md"
LATE = 0.9  # share of the epochs from which on a best one says that more epochs may help


def gain_message(
    metric: str,
    tuned: float,
    before: float,
    interval: tuple[float, float] | None,
    units: str,
    split: str = "test",
    *,
    epoch: int,
    epochs: int,
) -> str:
    """Return a line that says whether training improved a metric, as far as the interval shows it.

    Args:
        interval: 95 % interval of their difference on the same queries; None if there are too few classes for one.
        units: what the interval is over, e.g. "30 classes".
        epoch, epochs: epoch of the checkpoint, and number of epochs of the run.
    """
    line = f"{metric} on {split}: {tuned:.3f} after training, {before:.3f} before:"
    change = f"{tuned - before:+.3f}"
    if interval is None:
        return f"{line} {change}, without an interval"
    low, high = interval
    ends = f"{low:.3f} to {high:.3f}"
    if high > NO_GAIN and low > 0:
        return f"{line} {change} ({ends})"
    if high > NO_GAIN:
        verdict = f"no gain is detectable with {units}"
    elif high < 0 and low < -NO_GAIN:
        verdict = "training made it worse"
    else:
        verdict = "training did not help here"
    way = "try more epochs," if epoch >= LATE * epochs else f"epoch {epoch} of {epochs} is the best, so try"
    return f"{line} {verdict} ({change}, {ends}); {way} {ADVICE}"


class Line(NamedTuple):
    """Line of a table: a run, or the pretrained checkpoint of runs, on the test classes."""

    name: str  # short, unique among the lines
    report: Report
    changes: dict[str, Comparison]  # difference from the first run, by metric
    corrected: dict[str, float]  # p-values of the changes, corrected for all changes in the table; see `holm`


def lines_of(results: Sequence[Result], width: int | None = None) -> list[Line]:
    """List the runs, by names of at most ``width`` if possible, and their pretrained checkpoints, a shared one once."""
    names = short_names([result.name for result in results], width)
    rows = [(name, result.report, result.changes) for name, result in zip(names, results, strict=True)]
    before: dict[str, list[tuple[str, Figures]]] = {}
    for name, result in zip(names, results, strict=True):
        if result.pretrained and result.pretrained.report.question:
            before.setdefault(result.pretrained.report.question.key(), []).append((name, result.pretrained))
    first = results[0]
    for sharing in before.values():
        report, per_query, _ = sharing[0][1]
        runs = "" if len(sharing) == len(results) else f" ({', '.join(name for name, _ in sharing)})"
        same = report.images == first.report.images
        changes = paired_differences(first.per_query, per_query, first.classes) if same else {}
        rows.append((f"pretrained{runs}", report, changes))
    corrected = iter(holm([change.p_value for *_, changes in rows for change in changes.values()]))
    return [Line(*row, {name: next(corrected) for name in row[2]}) for row in rows]


def p_text(p_value: float | None) -> str:
    """Format a p-value with four digits; none is zero. Without a p-value the text is empty.

    Example:
        >>> p_text(0.03125), p_text(1.2e-7), p_text(None)
        ('0.0312', '< 0.0001', '')
    """
    if p_value is None:
        return ""
    return "< 0.0001" if p_value < 5e-5 else f"{p_value:.4f}"


def interval_text(ends: tuple[float, float] | None) -> str:
    """Format an interval with four digits; without one the text is empty."""
    return f"{ends[0]:.4f} .. {ends[1]:.4f}" if ends else ""


def comparison_rows(lines: Sequence[Line]) -> Rows:
    """Return one row per metric and model, with the difference from the first model if both have the same queries.

    A dash stands for a metric that a model does not have.
    """
    rows = [["metric", "run", "value", "95 % interval", "difference", "95 % interval of it", "p", "Holm's p"]]
    names = dict.fromkeys(name for line in lines for name in line.report.metrics)
    for name, line in product(names, lines):
        value, interval = line.report.metrics.get(name), interval_text(line.report.intervals.get(name))
        row, change = [name, line.name, "-" if value is None else f"{value:.4f}", interval], line.changes.get(name)
        if change:
            row += [f"{change.difference:+.4f}", f"{change.low:+.4f} .. {change.high:+.4f}" if change.ends else ""]
            row += [p_text(change.p_value), p_text(line.corrected[name])]
        rows.append([*row, *([] if change else [""] * 4)])
    return rows


def narrow_rows(lines: Sequence[Line]) -> tuple[Rows, Rows]:
    """Split `comparison_rows` into two tables for a terminal of 80 columns: values and differences."""
    rows = comparison_rows(lines)
    values, (_, *differences) = [row[:4] for row in rows], [[*row[:2], *row[4:]] for row in rows if row[4]]
    head = ["metric", "run", "difference, 95 % interval", "p", "Holm's p"]
    body = [[*row[:2], f"{row[2]}  {row[3] or 'no interval'}", *row[4:]] for row in differences]
    return values, [head, *body] if body else []


def short_names(names: Sequence[str], width: int | None = None) -> list[str]:
    """Return the ends of paths that distinguish them; longer ones than ``width`` lose the words that all start with.

    If they still are longer, they are cut to about that many characters, unless they would not be distinct.
    """
    ends = distinct_tails([Path(name) for name in names])
    if width is None or max(map(len, ends)) <= width:
        return ends
    shared = commonprefix(ends)  # noqa: RUF071 - of characters
    words = 1 + max(shared.rfind(mark) for mark in "/_-. ")
    short = shortened_apart([end[words:] for end in ends], width)
    return short if len(set(short)) == len(short) and all(short) else ends
