"""``dmlkit eval``: evaluate a run, an embeddings folder, or arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from dmlkit.cli.console import bars
from dmlkit.cli.evaluation_report import Shown, tell_run, tell_untrained
from dmlkit.cli.option_groups import ColumnOptions
from dmlkit.cli.options import (
    TRAIN,
    ArrayLabels,
    ArrayManifold,
    Checkpoint,
    Json,
    SplitName,
    Writes,
    argument,
    examples,
    option,
    plain_device,
    with_common_options,
)
from dmlkit.cli.search import rerank_of
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_file
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

app = typer.Typer()


@dataclass(frozen=True)
class EvaluatedOptions:
    """What is evaluated: a source, a recipe, or arrays."""

    source: Annotated[
        Path | None,
        argument(
            "SOURCE|RECIPE",
            "Run, embeddings folder, gallery, or .npy file (needs --labels); with --untrained a run or a recipe.",
        ),
    ] = None
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Measure the backbone with its initial weights, without the head.")
    ] = False
    embeddings: Annotated[
        Path | None, option("FILE", "Another way to name an .npy file (N, D) as SOURCE.", check=require_array)
    ] = None
    labels: ArrayLabels = None
    gallery: Annotated[
        Path | None, option("FILE", ".npy file of vectors to search in. Default: SOURCE itself.", check=require_array)
    ] = None
    gallery_labels: Annotated[
        Path | None, option("FILE", ".npy file of the labels of --gallery; required with it.", check=require_array)
    ] = None
    manifold: ArrayManifold = None

    def with_arrays(self) -> "EvaluatedOptions":
        """Return the options with an .npy file that is given as SOURCE as --embeddings."""
        source = self.source
        if source is None or source.suffix != ".npy" or source.is_dir() or self.embeddings is not None:
            return self
        return replace(self, source=None, embeddings=source)

    @property
    def arrays(self) -> dict[str, Path | None]:
        """Files by the names of the options."""
        labels = {"--embeddings": self.embeddings, "--labels": self.labels}
        return {**labels, "--gallery": self.gallery, "--gallery-labels": self.gallery_labels}

    def kind(self, run: "RunOptions", others: dict[str, object]) -> str:
        """Return the kind of source that is evaluated: that of `kind_of`, or untrained.

        Args:
            run: options that apply only to runs.
            others: values of other options that do not apply to every kind, by their names.

        Raises:
            UserError: there is no source or more than one, or an option does not apply to it.
        """
        if self.untrained:
            self.check_untrained(run)
            return "untrained"
        self.check_arrays()
        others = {**run.given(), **others}
        if self.source is None:
            refuse("arrays", others)
            return "array"
        if self.source.is_file():
            raise UserError(
                f"eval: {self.source}: got a file, expected a run or embeddings folder; for a recipe use --untrained, "
                "or train it first"
            )
        kind = kind_of(self.source)
        check_options(self.source, kind, {**others, "--manifold": self.manifold})
        if kind == "images":
            raise UserError(f"eval: {self.source}: expected {EXPECTED}, or --dataset-root {self.source} with a run")
        return require_source(self.source)

    def check_untrained(self, run: "RunOptions") -> None:
        """Check a source for ``--untrained``.

        Raises:
            UserError: an option does not apply, or the source is not a recipe or a run.
        """
        refuse(
            "--untrained, which has no head and no checkpoint",
            {"--checkpoint": run.checkpoint, "--manifold": self.manifold},
        )
        refuse("--untrained, which needs a recipe or a run", self.arrays)
        if self.source is None:
            raise UserError("eval: --untrained needs a RECIPE or a RUN, e.g. dmlkit eval recipe.yaml --untrained")
        if not self.source.is_dir():
            from dmlkit.recipe.overrides import read_tree

            read_tree(self.source)
        elif (kind := kind_of(self.source)) in ("embeddings", "gallery"):
            raise UserError(f"eval: {self.source} is {NAMES[kind]}; --untrained needs a recipe or a run")

    def check_arrays(self) -> None:
        """Refuse a source with arrays, neither of them, and arrays without their labels.

        Raises:
            UserError: one of these.
        """
        given = [name for name, path in self.arrays.items() if path is not None]
        if (self.source is None) == (not given):
            if self.source is not None and given == ["--labels"]:
                check_options(self.source, kind_of(self.source), {"--labels": self.labels})
            raise UserError("eval: expected a run, an embeddings folder, a gallery, or x.npy --labels y.npy")
        if self.embeddings is not None and self.labels is None:
            raise UserError(f"eval: {self.embeddings}: an .npy file needs its labels; add --labels FILE")
        if given not in ([], ["--embeddings", "--labels"], list(self.arrays)):
            raise UserError(
                f"eval: got {' '.join(given)}; expected --embeddings and --labels, and optionally both --gallery and "
                "--gallery-labels"
            )


@dataclass(frozen=True)
class MetricOptions:
    """Options on which metrics are computed, and how."""

    metric: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Metric, e.g. recall@10, map@r, nmi, or recall@1:genus for a level of a hierarchy. Repeatable. "
            "Default: those of the recipe.",
        ),
    ] = None
    ties: Annotated[
        Literal["expected", "pessimistic"],
        option("RULE", "How to rank equal scores: expected (mean over all orders) or pessimistic (hits last)."),
    ] = "expected"


@dataclass(frozen=True)
class ChangeOptions:
    """Changes of the embeddings or the ranking, with which the plain ones are compared."""

    rerank: Annotated[
        str | None,
        option(
            "METHOD",
            "Compare with re-ranking: k_reciprocal or expansion; options after a colon, e.g. expansion:n=3. "
            "Defaults: k1=20, k2=6, weight=0.3; n=5, alpha=3.",
        ),
    ] = None
    tta: Annotated[
        Literal["flip", "scales"] | None,
        option(
            "WHAT",
            "For a run: compare with the mean embedding of each image and copies of it: flip (its mirror image) "
            "or scales (0.71 and 1.41 times the side).",
        ),
    ] = None
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
    ] = None
    evidence: Annotated[
        str | None,
        option(
            "center|FILE",
            "For a run: measure how much of the last metric comes from outside the objects. FILE: a table of "
            "boxes (path, x1, y1, x2, y2) or masks (path, mask); center: the object is a central square.",
        ),
    ] = None
    dims: Annotated[list[int] | None, option("N", "Compare with the first N coordinates alone. Repeatable.", min=1)] = (
        None
    )
    precision: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Compare with stored forms: fp32, fp16, int8, binary (signs) or rescored (signs choose 100, and the "
            "full vectors order them). Repeatable. Default: fp32, with --dims.",
        ),
    ] = None

    @property
    def of_runs(self) -> dict[str, object]:
        """Values of options that apply only to runs, by their names."""
        return {"--tta": self.tta, "--with": self.second, "--evidence": self.evidence}

    def check(self, kind: str, run: "RunOptions") -> None:
        """Refuse changes that do not apply to a kind of source, or not together.

        Raises:
            UserError: one of these.
        """
        if self.evidence is not None:
            refuse("--evidence", {"--set": run.overrides, "--dataset-root": run.dataset_root})
            refuse("--evidence", {"--untrained": kind == "untrained"})
            if self.evidence != "center":
                require_path(Path(self.evidence), "center, or a table (.csv or .parquet) with boxes or masks")
        if kind == "untrained":
            forms = {"--dims": self.dims, "--precision": self.precision}
            others = {"--rerank": self.rerank, "--tta": self.tta, "--with": self.second}
            refuse("--untrained; train first, or use embeddings", others | forms)
        elif kind == "gallery":
            refuse("a gallery; one of two runs is evaluated with both", {"--with": self.second})
        if self.second:
            refuse("--with", {"--tta": self.tta, "--set": run.overrides})
        if self.second in PARTNERS:
            refuse(f"--with {self.second}", {"--rerank": self.rerank})


@dataclass(frozen=True)
class RunOptions:
    """Options that apply only to runs: which images, weights and device."""

    split: Annotated[
        SplitName | None,
        option(
            "SPLIT", "Split of the dataset: train, validation, test or all. Default: test; all with --dataset-root."
        ),
    ] = None
    checkpoint: Checkpoint = None
    dataset_root: Annotated[
        Path | None,
        option(
            "FOLDER",
            "Evaluate a run on this folder of images, with one subfolder per class.",
            check=partial(require_dataset, expected="a folder with one subfolder per class"),
        ),
    ] = None
    overrides: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE",
            "Override a key that evaluation reads, e.g. dataset.root=PATH; of a recipe any key. Repeatable.",
            "--set",
        ),
    ] = None
    device: Annotated[
        str | None,
        option("DEVICE", "Where to evaluate a run: auto, cpu, cuda, cuda:N or mps. Default: auto.", check=plain_device),
    ] = None

    def given(self) -> dict[str, object]:
        """Return the values by the names of the options."""
        images = {"--split": self.split, "--checkpoint": self.checkpoint, "--dataset-root": self.dataset_root}
        return {**images, "--set": self.overrides, "--device": self.device}


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
    evaluated: EvaluatedOptions,
    wanted: MetricOptions,
    per_class: Annotated[
        Path | None,
        Writes(check_file),
        option("FILE", "Write a CSV file with one row per class, worst first."),
    ] = None,
    *,
    column: ColumnOptions,
    changes: ChangeOptions,
    run: RunOptions,
    json: Json = False,
) -> None:
    """Measure retrieval with confidence intervals, for a run on its test classes or for any embeddings."""
    evaluated, asked = evaluated.with_arrays(), column.column()
    kind = evaluated.kind(run, {**changes.of_runs, "--by": column.by})
    changes.check(kind, run)

    from dmlkit.evaluation.arrays import evaluate_arrays, evaluate_points
    from dmlkit.metrics.ranking.codec import stored_forms

    try:
        forms = stored_forms(changes.dims or (), changes.precision or ())
    except ValueError as error:
        raise UserError(str(error)) from None
    method, source = rerank_of(changes.rerank), evaluated.source
    shown = Shown(Console(stderr=json), json, per_class, asked, method, changes.tta, forms=forms)
    options: Any = {"metrics": wanted.metric or [], "ties": wanted.ties, "rerank": method, "bar": bars(shown.console)}
    if evaluated.embeddings and evaluated.labels:
        pair = (evaluated.gallery, evaluated.gallery_labels)
        options |= {"gallery": pair if all(pair) else None, "manifold": evaluated.manifold or "sphere"}
        found = evaluate_arrays(evaluated.embeddings, evaluated.labels, **options)
        shown.tell(*found, title=str(evaluated.embeddings))
    elif source and kind in ("embeddings", "gallery"):
        from dmlkit.gallery.sources import open_points

        points = open_points(source)
        shown = shown.with_table(points)
        shown.tell(*evaluate_points(points, **options), title=str(source), run=points.run)
    elif source:
        from dmlkit.distributed.launch import start_ranks
        from dmlkit.evaluation.run import Scope

        fabric = start_ranks(run.device or "auto")
        shown.console.quiet = not fabric.is_global_zero
        scope = Scope(run.split, run.dataset_root, run.overrides or (), wanted.metric or (), wanted.ties, asked)
        if kind == "untrained":
            tell_untrained(source, fabric, shown, scope)
        else:
            tell_run(source, fabric, replace(shown, evidence=changes.evidence), scope, run.checkpoint, changes.second)


def refuse(what: str, options: Mapping[str, object]) -> None:
    """Refuse options that do not apply to the source.

    Raises:
        UserError: an option is given; the message names the first one.
    """
    for name, value in options.items():
        if value:
            raise UserError(f"eval: {name} does not apply to {what}; leave it out")
