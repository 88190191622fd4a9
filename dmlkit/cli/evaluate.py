"""``dmlkit eval``: evaluate a run, the backbone of a recipe, an embeddings folder, a gallery, or arrays."""

from pathlib import Path
from typing import Annotated

from rich.console import Console

from dmlkit.cli.evaluation_report import Shown, tell_backbone, tell_points, tell_run
from dmlkit.cli.options import (
    ArrayManifold,
    Checkpoint,
    Conditions,
    Json,
    RerankMethod,
    RunDevice,
    SplitName,
    Writes,
    by_option,
    column_of,
    command,
    each,
    second_option,
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


@command(
    "dmlkit eval runs/demo --json",
    "dmlkit eval runs/demo photos/ --evidence center",
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
        "For a run or recipe: a folder of images to test on, with one subfolder per class. For vectors: those of the "
        "same model to search in. Default: SOURCE itself.",
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
    by: Annotated[str | None, by_option("Print the last metric")] = None,
    where: Conditions = None,
    rerank: RerankMethod = None,
    second: Annotated[
        Path | None,
        second_option(
            "RUN|local|...",
            "Compare with a second run of the same dataset; the patches of the 100 nearest images (local); or "
            "means with mirror images (flip) or 0.71 and 1.41 times the size (scales). For a run in a folder of such a "
            "name, write e.g. ./local.",
            *(LOCAL, FLIP, SCALES),
        ),
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
    kind = evaluated_kind(source, checkpoint)
    of_vectors = {"--rerank": rerank, "--form": form, "--manifold": manifold}
    of_runs = {"--split": split, "--set": overrides, "--with": second, "--evidence": evidence, "--by": by}
    check_options(source, kind, {**of_vectors, **of_runs, "--where": where, "--device": device})
    images, asked = other if kind in ("run", "backbone") else None, column_of(by)
    if images is not None:
        require_dataset(images, "a folder with one subfolder per class")
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
    scope = Scope(split, images, overrides or (), metric or (), asked, where_of(where), rerank_of(rerank))
    shown = Shown(Console(stderr=json), json, output, scope, forms, evidence)
    if kind not in ("run", "backbone"):
        tell_points(source, other, shown, labels_of, manifold)
        return

    from dmlkit.distributed.launch import start_ranks

    ranks = start_ranks(device or "auto")
    shown.console.quiet = not ranks.is_global_zero
    if kind == "backbone":
        tell_backbone(source, ranks, shown)
    else:
        tell_run(source, ranks, shown, checkpoint, second)


def evaluated_kind(source: Path, checkpoint: str | None) -> Kind:
    """Return the kind of what is evaluated: that of `kind_of`, or the backbone of a recipe, which is not trained."""
    from dmlkit.recipe.overrides import is_recipe, read_tree

    if not is_recipe(source):
        kind = require_source(source)
        check_options(source, kind, {"--checkpoint": checkpoint})
        return kind
    read_tree(source)
    check_options(source, "backbone", {"--checkpoint": checkpoint if checkpoint != "pretrained" else None})
    return "backbone"


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
    is_points = kind not in ("run", "backbone")
    sources = [path for path in (source, other) if is_points and path is not None]
    arrays = [path for path in sources if require_source(path) == "array"]
    if labels and len(labels) < len(arrays):
        from dmlkit.files.vector_file import VectorFile

        arrays = [path for path in arrays if VectorFile(path).labels() is None]
    if len(labels) > len(arrays):
        check_options(source, kind, {"--labels": labels})
        raise UserError(f"--labels {labels[-1]}: {len(labels)} files for the labels of {len(arrays)}; remove it")
    return dict(zip(arrays, labels, strict=False))
