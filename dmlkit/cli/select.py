"""``dmlkit select``: which images to label next."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dmlkit.cli.console import bars, counted, image_cell, print_table, say, say_json, say_skipped
from dmlkit.cli.option_groups import ModelOptions
from dmlkit.cli.options import ArrayLabels, ArrayManifold, Json, SourcePath, SplitName, Writes, command
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_file
from dmlkit.files.source import check_options, kind_of, require_queries

if TYPE_CHECKING:
    from dmlkit.review.select import ChosenImages, LearningCurve

MOST_SHOWN = 10  # images printed in the terminal


@command(
    "dmlkit select galleries/birds inbox -n 200 -o next.csv",
    "dmlkit select embeddings/photos -n 200 -o next.csv",
    "dmlkit select galleries/birds --measure -n 50",
)
def select(
    source: SourcePath,
    images: Annotated[
        Path | None,
        "IMAGES",
        "Unlabeled images: an image, folder or table, or embeddings (as SOURCE) of the same model. Default: those of "
        "SOURCE without a label.",
        require_queries,
    ] = None,
    /,
    number: Annotated[int, "COUNT", "Number of images to choose; with --measure per round."] = 200,
    output: Annotated[Path | None, "FILE", "Write them to this table (.csv).", Writes(check_file, (".csv",))] = None,
    method: Annotated[
        Literal["coverage", "k_center"],
        "METHOD",
        "Choose by coverage (reduce the mean distance of all images to a labeled one) or k_center (take the image "
        "farthest from all labeled ones).",
    ] = "coverage",
    threshold: Annotated[
        float | None,
        "SIMILARITY",
        "Minimum similarity of near-duplicates, which are left out; dmlkit duplicates proposes one. Default: that of "
        "equal images.",
    ] = None,
    measure: Annotated[bool, "Compare with random choice on the labeled images of SOURCE instead."] = False,
    split: Annotated[
        SplitName | None, "SPLIT", "Split of a run: train, validation, test or all. Default: all; with --measure test."
    ] = None,
    *,
    chosen: ModelOptions,
    labels: ArrayLabels = None,
    manifold: ArrayManifold = None,
    json: Json = False,
) -> None:
    """Choose which images to label next: similar to many unlabeled images and to no labeled one.

    The table has a column label to fill in; train, review and gallery add read it.
    """
    if measure:
        for name, value in (("IMAGES", images), ("--output", output), ("--run", chosen.run)):
            if value is not None:
                way = f"leave out {name} {value}"
                raise UserError(f"--measure: takes the labeled images of SOURCE and chooses none; {way}")
    elif chosen.run is not None and images is None:
        raise UserError(f"--run {chosen.run}: embeds IMAGES, which are missing; name them, or remove this option")
    kind = kind_of(source)
    check_options(source, kind, {"--split": split})
    chosen.check_device(source, *([] if images is None else [images]))

    from dmlkit.gallery.sources import open_queries
    from dmlkit.identify.search import open_searched
    from dmlkit.nearest.near_pairs import check_reachable
    from dmlkit.review.select import measure as measure_selection
    from dmlkit.review.select import select as select_images
    from dmlkit.run_folder.folder import RunFolder
    from dmlkit.vectors.fusion import ModelChoice
    from dmlkit.vectors.points import in_memory, require_one_label

    if kind == "run":
        RunFolder(source).recipe().dataset.require_one_label(str(source))  # before it is embedded
    model = ModelChoice(chosen.run, device=chosen.device)
    if kind == "run" and split is None and not measure:
        split = "all"
    labeled = in_memory(open_searched(source, model, bars(), split=split, labels=labels, manifold=manifold))
    if measure:
        curve = measure_selection(labeled, number, rule=method, threshold=threshold, bar=bars())
        say_json(curve.plain()) if json else print_curve(curve)
        say_skipped(labeled.skipped)
        return
    require_one_label(labeled)  # before IMAGES are embedded
    if threshold is not None:
        check_reachable(labeled.manifold, threshold)
    unlabeled = None if images is None else in_memory(open_queries(images, labeled, model=model, bar=bars()))
    selection = select_images(labeled, unlabeled, count=number, rule=method, threshold=threshold, bar=bars())
    show_selection(selection, number, output, json=json)


def show_selection(selection: "ChosenImages", count: int, output: Path | None, *, json: bool) -> None:
    """Write the chosen images before they are printed, since what reads the output may end, e.g. head."""
    if output is not None:
        selection.write(output)
    say_json(selection.plain()) if json else print_selection(selection, count)
    if output is not None:
        say(f"wrote {output}; write the labels into its column label")


def print_selection(selection: "ChosenImages", count: int) -> None:
    """Print the first chosen images, and what was left out."""
    rows: list[list[str | list[str]]] = [["path", "guess", "similarity", "margin", "score"]]
    numbers = zip(selection.similarities.tolist(), selection.margins.tolist(), selection.scores.tolist(), strict=True)
    for row, guess, figures in list(zip(selection.rows.tolist(), selection.guesses, numbers, strict=True))[:MOST_SHOWN]:
        cells = [f"{figure:.4f}" if abs(figure) < float("inf") else "" for figure in figures]
        rows.append([image_cell(selection.images.short_paths[row], selection.images.boxes[row]), guess or "", *cells])
    chosen, whole = len(selection.rows), len(selection.images)
    if chosen:
        print_table(rows, f"{chosen} of {counted(whole, 'image')} to label next")
    if chosen > MOST_SHOWN:
        say(f"the first {MOST_SHOWN} are shown; -o FILE writes all")
    if selection.duplicates:
        images = counted(selection.duplicates, "image is a near-duplicate", "images are near-duplicates")
        say(f"{images} of labeled or chosen ones (similarity of at least {selection.threshold:.4f})")
    if chosen < min(count, whole):
        say(f"note: -n {count} is reduced to {chosen}: all others are near-duplicates")
    elif chosen < count:
        say(f"note: -n {count} is reduced to {chosen}, the number of images in {selection.images.source}")
    say_skipped(selection.skipped)


def print_curve(curve: "LearningCurve") -> None:
    """Print the accuracies as labels grow, and whether selection is better than random choice."""
    rows = [["labels", "selected", "random", "difference, 95 % interval"]]
    for point in curve.points:
        change, is_first = point.difference, point is curve.points[0]
        ends = "" if is_first else f"{change.difference:+.4f}  {change.low:+.4f} .. {change.high:+.4f}"
        rows.append([f"{point.labels:,}", f"{point.selected:.4f}", f"{point.random:.4f}", ends])
    print_table(rows, f"nearest-neighbor accuracy of {curve.held_out:,} held-out images")
    change = curve.difference
    verdict = "not separable from random choice"
    if curve.is_separable:
        verdict = f"selection is {'better' if change.low > 0 else 'worse'} than random choice"
    ends = f"({change.low:+.4f} to {change.high:+.4f}, p {change.p_value:.2g})"
    say(f"{verdict}: mean difference {change.difference:+.4f} {ends} over {curve.seeds} seeds", style="bold")
    say(f"{curve.images:,} images of {curve.classes:,} labels, the same model throughout; other images may differ")
