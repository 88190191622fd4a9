"""Evaluation of a run, and its output: a table in the terminal or JSON, and a table of classes in a file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dmlkit.cli.compare import gain_of
from dmlkit.cli.console import bars, counted, fusion_line, percent, print_table, say, say_json, say_prose, say_skipped

if TYPE_CHECKING:
    from dmlkit.distributed.launch import Ranks
    from dmlkit.evaluation.by_value import ByColumn
    from dmlkit.evaluation.report import Evidence, Report
    from dmlkit.evaluation.run import Scope
    from dmlkit.metrics.ranking.codec import Stored
    from dmlkit.run_folder.folder import CheckpointName
    from dmlkit.vectors.points import PointSet

VALUES_SHOWN = 20


@dataclass(frozen=True)
class Shown:
    """The form of the output of an evaluation."""

    console: Console
    """Console for text; with --json it is standard error, and only JSON goes to standard output."""
    as_json: bool
    per_class: Path | None
    scope: "Scope"
    forms: "Sequence[Stored]" = ()
    evidence: str | None = None
    values: "Sequence[str | None] | None" = None
    """Values of evaluated points in the column of the scope, if they have it themselves."""

    def with_table(self, points: "PointSet") -> "Shown":
        """Return the same with the table of evaluated points, or refuse a column before anything is computed."""
        from dmlkit.evaluation.by_value import own_values, points_table

        if (column := self.scope.column) is None:
            return self
        if (values := own_values(*column, points)) is not None:
            return replace(self, values=values)
        return replace(self, scope=replace(self.scope, column=(column[0], points_table(*column, points))))

    def tell(self, report: "Report", evaluation: Any, *, title: str, run: Path | None = None) -> None:
        """Print a report, and write the table of classes if requested.

        Args:
            run: run of evaluated embeddings, whose table has the column.
        """
        from dmlkit.evaluation.report import with_stored_forms

        scope = self.scope
        if scope.column is not None:
            report = report.with_column(evaluation, *scope.column, run, self.values)
        report = report.with_alternative(evaluation, scope.rerank, copies=scope.copies, fusion=scope.fusion)
        report = with_stored_forms(report, evaluation, self.forms)
        if self.per_class is not None:
            evaluation.save_classes(self.per_class)
        if self.as_json:
            say_json(report.stamped())
            return
        console = self.console
        title = f"{title}: {counted(report.queries, 'query', 'queries')}, {counted(report.classes, 'class', 'classes')}"
        print_table(_metric_rows(report, evaluation.scores.definitions), console, title)
        for score in report.worst_classes[:3]:
            name, figure = list(score.metrics.items())[-1]
            number = counted(score.queries, "query", "queries")
            say_prose(console, f"worst class: {score.name}, {name} {figure:.4f} over {number}")
        for pair in report.confusions[:3]:
            share = f"{pair.queries} of its queries ({pair.share:.0%})"
            say_prose(console, f"confused: {pair.name} taken for {pair.taken_for} in {share}")
        print_alternative(report, console)
        print_forms(report, console)
        print_evidence(report.evidence, console)
        print_values(report.by, console)
        for note in report.notes:
            say_prose(console, f"note: {note}")
        say_skipped(console, report.skipped)


def print_alternative(report: "Report", console: Console) -> None:
    """Print the metrics with --rerank or --with, and their differences from the plain ones."""
    from dmlkit.evaluation.augmented import WORDS
    from dmlkit.evaluation.compare import p_text

    found, plain = report.alternative, report.metrics
    if found is None:
        return
    rows = [["metric", "plain", "changed", "difference, 95 % interval", "p", "Holm's p"]]
    for name, change in found.differences.items():
        low, high = change["low"], change["high"]
        ends = "no interval" if low is None or high is None else f"{low:+.4f} .. {high:+.4f}"
        cells = [f"{plain[name]:.4f}", f"{found.metrics[name]:.4f}", f"{change['difference']:+.4f}  {ends}"]
        rows.append([name, *cells, p_text(change["p_value"]), p_text(change["corrected"])])
    options = ", ".join(f"{name} {value:g}" for name, value in found.options.items())
    parts = [WORDS[found.tta]] if found.tta else []
    parts += [fusion_line(found.fusion.model_dump())] if found.fusion else []
    parts += [f"re-ranked by {found.rerank}: {options}"] if found.rerank else []
    print_table(rows, console, "; ".join(parts))
    if found.rerank:
        say(console, "note: re-ranking looks at the gallery as a whole")


def print_forms(report: "Report", console: Console) -> None:
    """Print the metrics of stored forms, one table per metric, with differences from the full embeddings."""
    from dmlkit.evaluation.compare import p_text

    for name in report.forms[0].differences if report.forms else ():
        rows = [["dims", "precision", "bytes", name, "difference, 95 % interval", "p"]]
        for form in report.forms or ():
            change = form.differences[name]
            low, high = change["low"], change["high"]
            ends = "no interval" if low is None or high is None else f"{low:+.3f} .. {high:+.3f}"
            cells = [str(form.dims), form.precision, f"{form.bytes:,}", f"{form.metrics[name]:.4f}"]
            rows.append([*cells, f"{change['difference']:+.4f}  {ends}", p_text(change["p_value"])])
        print_table(rows, console, f"{name} of stored forms, compared with all coordinates in fp32")


def print_evidence(found: "Evidence | None", console: Console) -> None:
    """Print how much of a metric comes from outside the objects, if asked for."""
    if found is None:
        return
    values = (found.whole, found.inside, found.outside, found.chance)
    rows = [["images that show", "all", "inside alone", "outside alone", "nothing"]]
    print_table([*rows, [found.metric, *(f"{value:.4f}" for value in values)]], console)
    where = "outside the central square" if found.regions == "center" else f"outside the regions of {found.regions}"
    if found.share is None:
        say(console, f"{found.metric} is not above chance, so that nothing comes from {where}")
        return
    ends = "no interval: fewer than 5 classes" if found.interval is None else "{:.2f} to {:.2f}".format(*found.interval)
    share = f"{found.share:.2f} of {found.metric} comes from {where} ({ends})"
    say(console, f"{share}, which has {percent(found.area)} of the area", style="bold")


def print_values(found: "ByColumn | None", console: Console, metrics: "Sequence[str] | None" = None) -> None:
    """Print metrics per value of a column, if asked for, worst first, with differences from all others.

    Args:
        metrics: names of the metrics. Default: the last one.
    """
    if found is None:
        return
    for name in metrics or [list(found.values[0].metrics)[-1]]:
        intervals = (f"{name}, 95 % interval", "to others, 95 % interval")
        rows = [[found.column, "queries", "classes", *intervals, "Holm's p"]]
        for one in found.values[:VALUES_SHOWN]:
            figures = one.metrics[name]
            ends, change = figures.interval, figures.difference_interval
            cells = [one.value, f"{one.queries:,}", f"{one.classes:,}"]
            cells += [f"{figures.mean:.4f}" + ("  {:.3f} .. {:.3f}".format(*ends) if ends else "")]
            cells += [f"{figures.difference:+.4f}" + ("  {:+.3f} .. {:+.3f}".format(*change) if change else "")]
            rows.append([*cells, f"{figures.corrected:.4f}"])
        print_table(rows, console, f"per {found.column}, worst first")
    if len(found.values) > VALUES_SHOWN:
        say(console, f"{len(found.values) - VALUES_SHOWN} more values: --json")
    if found.without:
        number = counted(found.without, "query has", "queries have")
        say_prose(console, f"note: {number} no {found.column} and count in none of these figures")
    if any(figures.difference_interval is None for one in found.values for figures in one.metrics.values()):
        say(console, "note: where a value or all others have fewer than 5 classes, there is no interval and p is 1")


def tell_backbone(source: Path, ranks: "Ranks", shown: Shown) -> None:
    """Evaluate the backbone from which the training of a recipe starts."""
    from dmlkit.training.pretrained import describe_backbone, evaluate_recipe

    report, evaluation, recipe = evaluate_recipe(source, ranks, shown.scope, bars(shown.console))
    if ranks.is_global_zero:
        title = f"{report.split} split of {recipe.dataset.title}, {describe_backbone(recipe)}"
        shown.tell(report, evaluation, title=title)


def tell_points(source: Path, other: Path | None, shown: Shown, labels: dict[Path, Path], manifold: str | None) -> None:
    """Evaluate points, searched among themselves or in others."""
    from dmlkit.evaluation.arrays import evaluate_points
    from dmlkit.files.source import require_source
    from dmlkit.gallery.sources import array_points, open_points

    scope = shown.scope
    points = open_points(source, labels=labels.get(source), manifold=manifold, where=scope.where)
    gallery = other and (
        array_points(other, labels.get(other), points.manifold, scope.where)
        if require_source(other) == "array"
        else open_points(other, where=scope.where)
    )
    shown, bar = shown.with_table(points), bars(shown.console)
    found = evaluate_points(points, gallery, metrics=scope.metrics, rerank=scope.rerank, bar=bar)
    shown.tell(*found, title=str(source), run=points.run)


def tell_run(
    source: Path, ranks: "Ranks", shown: Shown, checkpoint: "CheckpointName | None", second: Path | None
) -> None:
    """Evaluate a run, and print the gain from training and the path of its report."""
    from dmlkit.evaluation.augmented import WORDS
    from dmlkit.evaluation.compare import result_of
    from dmlkit.evaluation.run import check_scope, evaluate_scope
    from dmlkit.evaluation.second import choose_second
    from dmlkit.vectors.manifest import LocalFusion

    progress, scope = bars(shown.console), shown.scope
    copies = next((name for name in WORDS if second == Path(name)), None)
    if copies is not None:
        scope = replace(scope, copies=copies)
    elif second is not None:
        check_scope(source, scope)
        fusion = choose_second(source, second, checkpoint=checkpoint, ranks=ranks, bar=progress)
        scope = replace(scope, fusion=fusion.weight if isinstance(fusion, LocalFusion) else fusion)
    elif not (scope.rerank or scope.images or scope.overrides or checkpoint == "pretrained"):
        scope = _with_techniques(scope, source)
    shown = replace(shown, scope=scope)
    run = evaluate_scope(source, ranks, scope, checkpoint=checkpoint, bar=progress)
    if not ranks.is_global_zero:
        return
    if shown.evidence is not None:
        from dmlkit.look.evidence import run_evidence

        found = run_evidence(source, run, shown.evidence, ranks=ranks, bar=progress)
        run = replace(run, report=run.report.model_copy(update={"evidence": found}))
    title = f"{run.report.split} split of {run.dataset}, {run.checkpoint} checkpoint, epoch {run.report.epoch}"
    shown.tell(run.report, run.evaluation, title=title)
    if shown.as_json:
        return
    compared = result_of(source, run)
    if gain := gain_of(compared) or compared.missing:
        say_prose(shown.console, gain)
    if run.path is not None:
        say(shown.console, f"written to {run.path}")


def _with_techniques(scope: "Scope", source: Path) -> "Scope":
    """Return the same with the techniques that validation chose for a run at the end of its training, if any."""
    from dmlkit.metrics.ranking.rerank import parse_rerank
    from dmlkit.run_folder.documents import Summary
    from dmlkit.run_folder.folder import RunFolder

    path = RunFolder(source).summary_path
    chosen = Summary.read(path).techniques if path.exists() else None
    if chosen is None:
        return scope
    return replace(scope, copies=chosen.tta, rerank=parse_rerank(chosen.rerank) if chosen.rerank else None)


def _metric_rows(report: "Report", definitions: dict[str, str]) -> list[list[str]]:
    """Return one row per metric of a report of ``dmlkit eval``."""
    from dmlkit.evaluation.compare import interval_text

    rows = [["metric", "value", "95 % interval", "definition"]]
    for name, value in report.metrics.items():
        rows.append([name, f"{value:.4f}", interval_text(report.intervals.get(name)), definitions[name]])
    return rows
