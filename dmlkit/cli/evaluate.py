"""``dmlkit eval``: evaluate a run, the backbone of a recipe, an embeddings folder, a gallery, or arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dmlkit.cli.compare import gain_of
from dmlkit.cli.console import (
    bars,
    counted,
    fusion_line,
    percent,
    print_table,
    ranks_of,
    say,
    say_json,
    say_prose,
    say_skipped,
)
from dmlkit.cli.options import (
    AS_PARTNER,
    COLUMN,
    PER_VALUE,
    ArrayManifold,
    Checkpoint,
    Conditions,
    Json,
    RerankMethod,
    RunDevice,
    SplitName,
    Writes,
    check_by,
    column_of,
    command,
    each,
    second_run,
    where_of,
)
from dmlkit.cli.search import rerank_of
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_file
from dmlkit.files.source import (
    FLIP,
    LOCAL,
    SCALES,
    Kind,
    check_options,
    require_dataset,
    require_labels,
    require_path,
    require_source,
)

if TYPE_CHECKING:
    from dmlkit.distributed.launch import Ranks
    from dmlkit.evaluation.by_value import ByColumn
    from dmlkit.evaluation.report import Evidence, Report
    from dmlkit.evaluation.run import Scope
    from dmlkit.metrics.ranking.codec import Stored
    from dmlkit.run_folder.folder import CheckpointName

VALUES_SHOWN = 20


@command(
    "dmlkit eval runs/demo --json",
    "dmlkit eval runs/demo --evidence center",
    "dmlkit eval x.npy --labels y.npy --metric map@r",
    "dmlkit eval recipe.yaml --set backbone.weights=resnet18.pth",
    name="eval",
)
def evaluate(
    source: Annotated[
        Path,
        "SOURCE",
        "Run, timm:NAME, embeddings folder, gallery, file of vectors, or recipe: its pretrained backbone.",
    ],
    other: Annotated[
        Path | None,
        "OTHER",
        "For a run or recipe: images to test on, a folder with one subfolder per class or a table. For vectors: those "
        "of the same model to search in. Default: SOURCE itself.",
    ] = None,
    /,
    labels: Annotated[
        list[Path] | None,
        "FILE",
        "For a file of vectors without labels: a file of them. Repeatable, for OTHER.",
        each(require_labels),
    ] = None,
    manifold: ArrayManifold = None,
    metric: Annotated[
        list[str] | None,
        "NAME",
        "Metric, e.g. recall@10, map@r, nmi, or recall@1:genus for a level of a hierarchy. Repeatable. Default: those "
        "of the recipe.",
    ] = None,
    by: Annotated[str | None, COLUMN, f"Print the last metric {PER_VALUE}", check_by] = None,
    where: Conditions = None,
    rerank: RerankMethod = None,
    second: Annotated[
        Path | None,
        "RUN|local|...",
        "Compare with a second run of the same dataset; the patches of the 100 nearest images (local); or means with "
        "mirror images (flip) or 0.71 and 1.41 times the size (scales). For a run in a folder of such a name, write "
        "e.g. ./local.",
        second_run(LOCAL, FLIP, SCALES),
        AS_PARTNER,
    ] = None,
    evidence: Annotated[
        str | None,
        "center|FILE",
        "For a run: measure how much of the last metric comes from outside the objects. FILE: a table of boxes (path, "
        "x1, y1, x2, y2) or masks (path, mask); center: the object is a central square.",
    ] = None,
    form: Annotated[
        list[str] | None,
        "N:NAME",
        "Compare with a form of vectors: the first N coordinates (e.g. 64), a precision, or both (64:int8): fp32, "
        "fp16, int8, binary (signs) or rescored (signs choose 100, and the full vectors order them). Repeatable.",
    ] = None,
    output: Annotated[
        Path | None, "FILE", "Write a CSV file with one row per class, worst first.", Writes(check_file, (".csv",))
    ] = None,
    split: Annotated[
        SplitName | None, "SPLIT", "Split of the dataset: train, validation, test or all. Default: test; all of OTHER."
    ] = None,
    checkpoint: Checkpoint = None,
    overrides: Annotated[
        list[str] | None,
        "KEY=VALUE",
        "Override a key that evaluation reads, e.g. dataset.root=PATH; of a recipe any key. Repeatable.",
    ] = None,
    device: RunDevice = None,
    json: Json = False,
) -> None:
    """Measure retrieval with confidence intervals, for a run on its test classes or for any embeddings."""
    from dmlkit.recipe.overrides import is_recipe, read_tree

    kind: Kind = "backbone" if is_recipe(source) else require_source(source)
    if kind == "backbone":  # it is not trained: its only checkpoint is the pretrained one
        read_tree(source)
    of_model = {"--checkpoint": None if (kind, checkpoint) == ("backbone", "pretrained") else checkpoint}
    of_vectors = {"--rerank": rerank, "--form": form, "--manifold": manifold}
    of_runs = {"--split": split, "--set": overrides, "--with": second, "--evidence": evidence, "--by": by}
    check_options(source, kind, {**of_model, **of_vectors, **of_runs, "--where": where, "--device": device})
    images, column = other if kind in ("run", "backbone") else None, column_of(by)
    if images is not None:
        require_dataset(images)
    if second is not None:
        check_second(second, kind, rerank, overrides)
    if evidence is not None:
        check_evidence(evidence, images, overrides or where)
    labels_of = array_labels(source, kind, other, labels or [])

    from dmlkit.evaluation.run import Scope
    from dmlkit.metrics.ranking.codec import stored_form

    try:
        forms = [stored_form(text) for text in dict.fromkeys(form or ())]
    except ValueError as error:
        raise UserError(str(error)) from None
    scope = Scope(split, images, overrides or (), metric or (), column, where_of(where), rerank_of(rerank))
    shown = Shown(json, output, scope, forms, evidence)
    if kind not in ("run", "backbone"):
        tell_points(source, other, shown, labels_of, manifold)
        return

    ranks = ranks_of(device or "auto")
    if kind == "run":
        tell_run(source, ranks, shown, checkpoint, second)
        return

    from dmlkit.training.pretrained import describe_backbone, evaluate_recipe

    report, evaluation, recipe = evaluate_recipe(source, ranks, shown.scope, bars())
    if ranks.is_global_zero:
        title = f"{report.split} split of {recipe.dataset.title}, {describe_backbone(recipe)}"
        shown.tell(report, evaluation, title=title)


def check_second(second: Path, kind: Kind, rerank: str | None, overrides: list[str] | None) -> None:
    """Check that a second similarity goes with the source and the other options."""
    if overrides or kind != "run":
        raise UserError(f"--with {second}: compares on a run's own data; evaluate a run without --set")
    if rerank is not None and second == Path(LOCAL):
        raise UserError(f"--with {second}: orders the nearest images itself; remove --rerank")


def check_evidence(evidence: str, images: Path | None, changes: list[str] | str | None) -> None:
    """Check that there are regions, and that the images are the run's own."""
    if changes or images is not None:
        way = "remove --set, --where and other images"
        raise UserError(f"--evidence {evidence}: is measured on a run's own images; {way}")
    if evidence != "center":
        require_path(Path(evidence), "center, or a table (.csv or .parquet) with boxes or masks")


def array_labels(source: Path, kind: Kind, other: Path | None, labels: list[Path]) -> dict[Path, Path]:
    """Return the file of labels of each file of vectors, given in their order; those with labels inside need none."""
    sources = [path for path in (source, other) if kind not in ("run", "backbone") and path is not None]
    arrays = [path for path in sources if require_source(path) == "array"]
    if labels and len(labels) < len(arrays):
        from dmlkit.files.vector_file import VectorFile

        arrays = [path for path in arrays if VectorFile(path).labels() is None]
    if len(labels) > len(arrays):
        check_options(source, kind, {"--labels": labels})
        raise UserError(f"--labels {labels[-1]}: {len(labels)} files for the labels of {len(arrays)}; remove it")
    return dict(zip(arrays, labels, strict=False))


@dataclass(frozen=True)
class Shown:
    """The form of the output of an evaluation."""

    as_json: bool
    per_class: Path | None
    scope: "Scope"
    forms: "Sequence[Stored]" = ()
    evidence: str | None = None
    values: "Sequence[str | None] | None" = None
    """Values of evaluated points in the column of the scope, if points are evaluated."""

    def tell(self, report: "Report", evaluation: Any, *, title: str) -> None:
        """Print a report, and write the table of classes."""
        from dmlkit.evaluation.report import with_stored_forms

        scope = self.scope
        if scope.column is not None:
            report = report.with_column(evaluation, *scope.column, self.values)
        report = report.with_alternative(evaluation, scope.rerank, copies=scope.copies, fusion=scope.fusion)
        report = with_stored_forms(report, evaluation, self.forms)
        if self.per_class is not None:
            evaluation.save_classes(self.per_class)
        if self.as_json:
            say_json(report.stamped())
        else:
            print_report(report, evaluation.scores.definitions, title)
        if self.per_class is not None:
            say(f"wrote {self.per_class}")


def print_report(report: "Report", definitions: Mapping[str, str], title: str) -> None:
    """Print the tables of a report, its worst classes, and its notes."""
    from dmlkit.evaluation.compare import interval_text

    title = f"{title}: {counted(report.queries, 'query', 'queries')}, {counted(report.classes, 'class', 'classes')}"
    rows = [["metric", "value", "95 % interval", "definition"]]
    for name, value in report.metrics.items():
        ends = interval_text(report.intervals.get(name))
        rows.append([name, f"{value:.4f}", ends, definitions[name]])
    print_table(rows, title)
    for score in report.worst_classes[:3]:
        name, figure = list(score.metrics.items())[-1]
        number = counted(score.queries, "query", "queries")
        say_prose(f"worst class: {score.name}, {name} {figure:.4f} over {number}")
    for pair in report.confusions[:3]:
        share = f"{pair.queries} of its queries ({pair.share:.0%})"
        say_prose(f"confused: {pair.name} taken for {pair.taken_for} in {share}")
    print_alternative(report)
    print_forms(report)
    print_evidence(report.evidence)
    print_values(report.by)
    for note in report.notes:
        say_prose(f"note: {note}")
    say_skipped(report.skipped)


def print_alternative(report: "Report") -> None:
    """Print the metrics with --rerank or --with, and their differences from the plain ones."""
    from dmlkit.evaluation.augmented import WORDS
    from dmlkit.evaluation.compare import p_text

    alternative, plain = report.alternative, report.metrics
    if alternative is None:
        return
    rows = [["metric", "plain", "changed", "difference, 95 % interval", "p", "Holm's p"]]
    for name, change in alternative.differences.items():
        cells = [f"{plain[name]:.4f}", f"{alternative.metrics[name]:.4f}", difference_text(change, digits=4)]
        rows.append([name, *cells, p_text(change["p_value"]), p_text(change["corrected"])])
    options = ", ".join(f"{name} {value:g}" for name, value in alternative.options.items())
    parts = [WORDS[alternative.tta]] if alternative.tta else []
    parts += [fusion_line(alternative.fusion.model_dump())] if alternative.fusion else []
    parts += [f"re-ranked by {alternative.rerank}: {options}"] if alternative.rerank else []
    print_table(rows, "; ".join(parts))
    if alternative.rerank:
        say("note: re-ranking looks at the gallery as a whole")


def difference_text(change: Mapping[str, float | None], digits: int) -> str:
    """Return a difference with the ends of its interval, which have some digits, if there is one."""
    low, high = change["low"], change["high"]
    ends = "no interval" if low is None or high is None else f"{low:+.{digits}f} .. {high:+.{digits}f}"
    return f"{change['difference']:+.4f}  {ends}"


def print_forms(report: "Report") -> None:
    """Print the metrics of stored forms, one table per metric, with differences from the full embeddings."""
    from dmlkit.evaluation.compare import p_text

    for name in report.forms[0].differences if report.forms else ():
        rows = [["dims", "precision", "bytes", name, "difference, 95 % interval", "p"]]
        for form in report.forms or ():
            change = form.differences[name]
            cells = [str(form.dims), form.precision, f"{form.bytes:,}", f"{form.metrics[name]:.4f}"]
            rows.append([*cells, difference_text(change, digits=3), p_text(change["p_value"])])
        print_table(rows, f"{name} of stored forms, compared with all coordinates in fp32")


def print_evidence(evidence: "Evidence | None") -> None:
    """Print how much of a metric comes from outside the objects, if asked for."""
    if evidence is None:
        return
    values = (evidence.whole, evidence.inside, evidence.outside, evidence.chance)
    rows = [["images that show", "all", "inside alone", "outside alone", "nothing"]]
    print_table([*rows, [evidence.metric, *(f"{value:.4f}" for value in values)]])
    regions = "the central square" if evidence.regions == "center" else f"the regions of {evidence.regions}"
    if evidence.share is None:
        say(f"{evidence.metric} is not above chance, so that nothing comes from outside {regions}")
        return
    ends = "{:.2f} to {:.2f}".format(*evidence.interval) if evidence.interval else "no interval: fewer than 5 classes"
    share = f"{evidence.share:.2f} of {evidence.metric} comes from outside {regions} ({ends})"
    say(f"{share}, which has {percent(evidence.area)} of the area", style="bold")


def print_values(by: "ByColumn | None", rates: "Sequence[str] | None" = None) -> None:
    """Print error rates, or else the last metric, per value of a column, worst first, with differences from others."""
    if by is None:
        return
    for name in rates or [list(by.values[0].metrics)[-1]]:
        rows = [[by.column, "queries", "classes", f"{name}, 95 % interval", "to others, 95 % interval", "Holm's p"]]
        worst = by.values if rates is None else sorted(by.values, key=lambda value: -value.metrics[name].mean)
        for of_value in worst[:VALUES_SHOWN]:
            figures = of_value.metrics[name]
            ends, change = figures.interval, figures.difference_interval
            cells = [of_value.value, f"{of_value.queries:,}", f"{of_value.classes:,}"]
            cells += [f"{figures.mean:.4f}" + ("  {:.3f} .. {:.3f}".format(*ends) if ends else "")]
            cells += [f"{figures.difference:+.4f}" + ("  {:+.3f} .. {:+.3f}".format(*change) if change else "")]
            rows.append([*cells, f"{figures.corrected:.4f}"])
        print_table(rows, f"per {by.column}, worst first")
    if len(by.values) > VALUES_SHOWN:
        say(f"{len(by.values) - VALUES_SHOWN} more values: --json")
    if by.without:
        number = counted(by.without, "query has", "queries have")
        say_prose(f"note: {number} no {by.column} and count in none of these figures")
    if any(figures.difference_interval is None for of_value in by.values for figures in of_value.metrics.values()):
        say("note: where a value or all others have fewer than 5 classes, there is no interval and p is 1")


def tell_points(source: Path, other: Path | None, shown: Shown, labels: dict[Path, Path], manifold: str | None) -> None:
    """Evaluate points, searched among themselves or in others."""
    from dmlkit.evaluation.arrays import evaluate_points
    from dmlkit.evaluation.rates_by_value import values_of_points
    from dmlkit.gallery.sources import array_points, open_points

    scope = shown.scope
    points = open_points(source, labels=labels.get(source), manifold=manifold, where=scope.where)
    gallery = other and (
        array_points(other, labels.get(other), points.manifold, scope.where)
        if require_source(other) == "array"
        else open_points(other, where=scope.where)
    )
    if scope.column is not None:  # refuse a column before anything is computed
        shown = replace(shown, values=values_of_points(*scope.column, points))
    scored = evaluate_points(points, gallery, metrics=scope.metrics, rerank=scope.rerank, bar=bars())
    shown.tell(*scored, title=str(source))


def tell_run(
    source: Path, ranks: "Ranks", shown: Shown, checkpoint: "CheckpointName | None", second: Path | None
) -> None:
    """Evaluate a run, and print the gain from training and the path of its report."""
    from dmlkit.evaluation.augmented import WORDS
    from dmlkit.evaluation.compare import result_of
    from dmlkit.evaluation.run import evaluate_scope, evaluated_recipe
    from dmlkit.evaluation.second import choose_second
    from dmlkit.run_folder.folder import RunFolder
    from dmlkit.vectors.manifest import LocalFusion

    progress, scope = bars(), shown.scope
    copies = next((name for name in WORDS if second == Path(name)), None)
    if copies is not None:
        scope = replace(scope, copies=copies)
    elif second is not None:
        evaluated_recipe(RunFolder(source), scope)  # before anything is embedded
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

        evidence = run_evidence(source, run, shown.evidence, ranks=ranks, bar=progress)
        run = replace(run, report=run.report.model_copy(update={"evidence": evidence}))
    title = f"{run.report.split} split of {run.dataset}, {run.checkpoint} checkpoint, epoch {run.report.epoch}"
    shown.tell(run.report, run.evaluation, title=title)
    if shown.as_json:
        return
    compared = result_of(source, run)
    if gain := gain_of(compared) or compared.missing:
        say_prose(gain)
    if run.path is not None:
        say(f"written to {run.path}")


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
