"""``dmlkit eval``: evaluate a run, an embeddings folder, or arrays."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import typer

from dmlkit.cli.evaluation_report import Shown, tell_run, tell_untrained
from dmlkit.cli.options import (
    TRAIN,
    ArrayLabels,
    ArrayManifold,
    Checkpoint,
    ColumnTable,
    Json,
    SplitName,
    Writes,
    argument,
    checked,
    examples,
    option,
    plain_device,
    with_common_options,
)
from dmlkit.cli.search import rerank_of
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_class_table
from dmlkit.files.source import (
    EXPECTED,
    NAMES,
    PARTNERS,
    check_options,
    kind_of,
    partner_path,
    require_array,
    require_dataset,
    require_path,
    require_second_run,
    require_source,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dmlkit.embedding.progress_bar import Bar
    from dmlkit.metrics.ranking.codec import Stored

app = typer.Typer()


@app.command(
    name="eval",
    rich_help_panel=TRAIN,
    epilog=examples(
        "dmlkit eval runs/demo --json",
        "dmlkit eval runs/demo --evidence center",
        "dmlkit eval --embeddings x.npy --labels y.npy --metric map@r",
        "dmlkit eval recipe.yaml --untrained --set backbone.weights=resnet18.pth",
    ),
)
@with_common_options
def evaluate(
    source: Annotated[
        Path | None,
        argument(
            "SOURCE|RECIPE",
            "Run, embeddings folder, gallery, or .npy file (needs --labels); with --untrained a run or a recipe.",
        ),
    ] = None,
    untrained: Annotated[
        bool,
        typer.Option("--untrained", help="Measure the backbone with its initial weights, without the head."),
    ] = False,
    embeddings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Another way to name an .npy file (N, D) as SOURCE.",
            callback=checked(require_array),
        ),
    ] = None,
    labels: ArrayLabels = None,
    gallery: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=".npy file of vectors to search in. Default: SOURCE itself.",
            callback=checked(require_array),
        ),
    ] = None,
    gallery_labels: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=".npy file of the labels of --gallery; required with it.",
            callback=checked(require_array),
        ),
    ] = None,
    manifold: ArrayManifold = None,
    metric: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Metric, e.g. recall@10, map@r, nmi, or recall@1:genus for a level of a hierarchy. Repeatable. "
            "Default: those of the recipe.",
        ),
    ] = None,
    ties: Annotated[
        Literal["expected", "pessimistic"],
        typer.Option(
            metavar="RULE", help="How to rank equal scores: expected (mean over all orders) or pessimistic (hits last)."
        ),
    ] = "expected",
    per_class: Annotated[
        Path | None,
        Writes(check_class_table),
        typer.Option(metavar="FILE", help="Write a CSV file with one row per class, worst first."),
    ] = None,
    by: Annotated[
        str | None,
        option(
            "COLUMN", "Print the last metric per value of this column of the run's table, e.g. camera, worst first."
        ),
    ] = None,
    table: ColumnTable = None,
    rerank: Annotated[
        str | None,
        option(
            "METHOD",
            "Compare with re-ranking: k_reciprocal or expansion; options after a colon, e.g. expansion:n=3. "
            "Defaults: k1=20, k2=6, weight=0.3; n=5, alpha=3.",
        ),
    ] = None,
    tta: Annotated[
        Literal["flip", "scales"] | None,
        option(
            "WHAT",
            "For a run: compare with the mean embedding of each image and copies of it: flip (its mirror image) "
            "or scales (0.71 and 1.41 times the side).",
        ),
    ] = None,
    second: Annotated[
        Path | None,
        option(
            "RUN|local|sift|place",
            "Add a second similarity, weighted by validation classes: that of a run of the same dataset, of the "
            "patches (local) or keypoints (sift) of the 100 nearest images, or of the columns latitude, longitude and "
            "time (place). For a run in a folder of such a name, write e.g. ./local.",
            "--with",
            check=partial(require_second_run, allowed=PARTNERS),
            parser=partner_path,
        ),
    ] = None,
    evidence: Annotated[
        str | None,
        option(
            "center|FILE",
            "For a run: measure how much of the last metric comes from outside the objects. FILE: a table of "
            "boxes (path, x1, y1, x2, y2) or masks (path, mask); center: the object is a central square.",
        ),
    ] = None,
    dims: Annotated[str | None, option("N,N", "Compare with the first coordinates alone, e.g. 512,128,32.")] = None,
    precision: Annotated[
        str | None,
        option(
            "NAME,NAME",
            "Compare with stored forms: fp32, fp16, int8, binary (signs) or rescored (signs choose 100, and the "
            "full vectors order them). Default: fp32, with --dims.",
        ),
    ] = None,
    split: Annotated[
        SplitName | None,
        typer.Option(
            metavar="SPLIT",
            help="Split of the dataset: train, validation, test or all. Default: test; all with --dataset-root.",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    dataset_root: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Evaluate a run on this folder of images, with one subfolder per class.",
            callback=checked(partial(require_dataset, expected="a folder with one subfolder per class")),
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE",
            "Override a key that evaluation reads, e.g. dataset.root=PATH; of a recipe any key. Repeatable.",
            "--set",
        ),
    ] = None,
    json: Json = False,
    device: Annotated[
        str | None,
        option("DEVICE", "Where to evaluate a run: auto, cpu, cuda, cuda:N or mps. Default: auto.", check=plain_device),
    ] = None,
) -> None:
    """Measure retrieval with confidence intervals, for a run on its test classes or for any embeddings."""
    if source is not None and source.suffix == ".npy" and not source.is_dir() and embeddings is None:
        source, embeddings = None, source
    arrays = {"--embeddings": embeddings, "--labels": labels, "--gallery": gallery, "--gallery-labels": gallery_labels}
    of_runs = {"--split": split, "--checkpoint": checkpoint, "--dataset-root": dataset_root, "--set": overrides}
    of_runs |= {"--device": device, "--tta": tta, "--with": second, "--evidence": evidence}
    if evidence is not None:
        refuse("--evidence", {"--set": overrides, "--dataset-root": dataset_root, "--untrained": untrained})
        if evidence != "center":
            require_path(Path(evidence), "center, or a table (.csv or .parquet) with boxes or masks")
    if table is not None and by is None:
        raise UserError(f"eval: --table {table}: needs --by COLUMN, the column to read")
    kind = evaluated_kind(source, arrays, of_runs, untrained=untrained, manifold=manifold, by=by)
    changes = {"--rerank": rerank, "--tta": tta, "--with": second, "--dims": dims, "--precision": precision}
    refuse_changes(kind, changes, overrides)

    from dmlkit.cli.progress import bars
    from dmlkit.evaluation.arrays import evaluate_arrays, evaluate_points
    from dmlkit.evaluation.evaluate import is_class_table
    from dmlkit.files.outputs import check_output

    if per_class is not None:
        read = [path for path in arrays.values() if path]
        check_output(per_class, is_class_table, sources=read, option="--per-class")
    method = rerank_of(rerank)
    forms = forms_of(dims, precision) if dims is not None or precision is not None else []
    shown = Shown(json, per_class, by, table, method, tta, forms=forms)
    wanted: Wanted = {"metrics": metric or [], "ties": ties, "bar": bars(shown.console)}
    if embeddings and labels:
        pair = (gallery, gallery_labels) if gallery and gallery_labels else None
        space = manifold or "sphere"
        found = evaluate_arrays(embeddings, labels, gallery=pair, manifold=space, rerank=method, **wanted)
        shown.tell(*found, title=str(embeddings))
    elif source and kind in ("embeddings", "gallery"):
        from dmlkit.embedding.sources import open_points

        points = open_points(source)
        shown.check_column(points.run)
        shown.tell(*evaluate_points(points, rerank=method, **wanted), title=str(source), run=points.run)
    elif source:
        from dmlkit.distributed.launch import start_ranks
        from dmlkit.evaluation.run import Scope

        fabric = start_ranks(device or "auto")
        shown.console.quiet = not fabric.is_global_zero
        scope = Scope(split, dataset_root, overrides or (), metric or (), ties, shown.column)
        if kind == "untrained":
            tell_untrained(source, fabric, shown, scope)
        else:
            tell_run(source, fabric, replace(shown, evidence=evidence), scope, checkpoint, second)


class Wanted(TypedDict):
    """Which metrics are computed, and how."""

    metrics: list[str]
    ties: Literal["expected", "pessimistic"]
    bar: "Bar"


def forms_of(dims: str | None, precision: str | None) -> "Sequence[Stored]":
    """Read ``--dims`` and ``--precision``.

    Raises:
        UserError: they cannot be read.
    """
    from dmlkit.metrics.ranking.codec import parse_stored

    try:
        return parse_stored(dims, precision)
    except ValueError as error:
        raise UserError(str(error)) from None


def evaluated_kind(
    source: Path | None,
    arrays: dict[str, Path | None],
    of_runs: dict[str, Any],
    *,
    untrained: bool,
    manifold: str | None,
    by: str | None = None,
) -> str:
    """Return the kind of source that is evaluated: that of `kind_of`, or untrained.

    Args:
        source: a run, an embeddings folder, a gallery, or a recipe.
        arrays: files, by option.
        of_runs: values of options that apply only to runs.
        untrained: whether the option is given.
        manifold: how arrays are compared.
        by: a column, if the metrics per value are asked for.

    Raises:
        UserError: there is no source or more than one, or an option does not apply to it.
    """
    given = [name for name, path in arrays.items() if path is not None]
    if untrained:
        refuse_untrained(source, given, {"--checkpoint": of_runs["--checkpoint"], "--manifold": manifold})
        if source is not None and not source.is_dir():
            from dmlkit.recipe.early import check_recipe

            check_recipe(source, of_runs["--set"] or [])
        return "untrained"
    check_arrays(source, arrays, given)
    if source is None:
        refuse("arrays", {**of_runs, "--by": by})
        return "array"
    if source.is_file():
        raise UserError(
            f"eval: {source}: got a file, expected a run or embeddings folder; for a recipe use --untrained, or train "
            "it first"
        )
    kind = kind_of(source)
    check_options(source, kind, {**of_runs, "--manifold": manifold, "--by": by})
    if kind == "images":
        raise UserError(f"eval: {source}: expected {EXPECTED}, or --dataset-root {source} with a run")
    return require_source(source)


def refuse_changes(kind: str, changes: dict[str, Any], overrides: list[str] | None) -> None:
    """Refuse changes of the embeddings or the ranking that do not apply to a source, or not together.

    Raises:
        UserError: one of these.
    """
    if kind == "untrained":
        refuse("--untrained; train first, or use embeddings", changes)
    elif kind == "gallery":
        refuse("a gallery; one of two runs is evaluated with both", {"--with": changes["--with"]})
    if changes["--with"]:
        refuse("--with", {"--tta": changes["--tta"], "--set": overrides})
    if changes["--with"] in PARTNERS:
        refuse(f"--with {changes['--with']}", {"--rerank": changes["--rerank"]})


def refuse_untrained(source: Path | None, given: list[str], options: dict[str, Any]) -> None:
    """Refuse what does not go with ``--untrained``.

    Raises:
        UserError: an option does not apply, or the source is not a recipe or a run.
    """
    refuse("--untrained, which has no head and no checkpoint", options)
    refuse("--untrained, which needs a recipe or a run", dict.fromkeys(given, True))
    if source is None:
        raise UserError("eval: --untrained needs a RECIPE or a RUN, e.g. dmlkit eval recipe.yaml --untrained")
    if source.is_dir() and kind_of(source) in ("embeddings", "gallery"):
        raise UserError(f"eval: {source} is {NAMES[kind_of(source)]}; --untrained needs a recipe or a run")


def check_arrays(source: Path | None, arrays: dict[str, Path | None], given: list[str]) -> None:
    """Refuse a source with arrays, neither of them, and arrays without their labels.

    Raises:
        UserError: one of these.
    """
    if (source is None) == (not given):
        if source is not None and given == ["--labels"]:
            check_options(source, kind_of(source), {"--labels": arrays["--labels"]})
        raise UserError("eval: expected a run, an embeddings folder, a gallery, or x.npy --labels y.npy")
    if given not in ([], ["--embeddings", "--labels"], list(arrays)):
        raise UserError(
            f"eval: got {' '.join(given)}; expected --embeddings and --labels, and optionally both --gallery and "
            "--gallery-labels"
        )


def refuse(what: str, options: dict[str, Any]) -> None:
    """Refuse options that do not apply to the source.

    Raises:
        UserError: an option is given; the message names the first one.
    """
    for name, value in options.items():
        if value:
            raise UserError(f"eval: {name} does not apply to {what}; leave it out")
