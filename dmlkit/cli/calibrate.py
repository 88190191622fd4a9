"""``dmlkit calibrate``: a threshold for pairs of images, or for the labels of a gallery."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dmlkit.cli.console import bars, print_table, ranks_of, say, say_json, say_prose
from dmlkit.cli.evaluate import print_values
from dmlkit.cli.option_groups import MovedModelOptions
from dmlkit.cli.options import (
    COLUMN,
    PER_VALUE,
    Checkpoint,
    Conditions,
    Json,
    SetDataset,
    check_by,
    column_of,
    command,
    where_of,
)
from dmlkit.errors import UserError, counted, some_of
from dmlkit.files.escape import command_word
from dmlkit.files.source import check_options, kind_of, require_gallery, require_queries, require_run

if TYPE_CHECKING:
    from dmlkit.files.where import Where
    from dmlkit.identify.calibration import Identification
    from dmlkit.metrics.reliability import Reliability
    from dmlkit.run_folder.folder import CheckpointName
    from dmlkit.run_folder.threshold import Threshold


def require_calibratable(path: Path) -> None:
    """Check that a folder is a run or a gallery."""
    (require_gallery if kind_of(path, "a run or a gallery") == "gallery" else require_run)(path)


@command("dmlkit calibrate runs/demo --far 1e-3", "dmlkit calibrate galleries/birds --fpir 0.01")
def calibrate(
    source: Annotated[Path, "SOURCE", "Run, or gallery.", require_calibratable],
    /,
    far: Annotated[
        float | None,
        "RATE",
        "Run: false accept rate, the share of different-class pairs that may count as same. Default: 0.001, "
        "or the lowest that the number of pairs allows.",
    ] = None,
    fpir: Annotated[
        float | None,
        "RATE",
        "Gallery: expected share of images of other labels, which are not in it, that get a label. Default: 0.01, "
        "or the lowest that the number of these images allows.",
    ] = None,
    strangers: Annotated[
        Path | None,
        "IMAGES",
        "Images whose labels are not in the gallery. Default: the validation images of its run.",
        require_queries,
    ] = None,
    near: Annotated[
        float | None,
        "SIMILARITY",
        "Minimum similarity of near-duplicates; near-duplicates with the same label are left out together.",
    ] = None,
    where: Conditions = None,
    by: Annotated[
        str | None,
        COLUMN,
        f"Print FAR and FRR, or FPIR and FNIR {PER_VALUE} For a gallery COLUMN is one of its own, e.g. side, each "
        "value of which gets a threshold, which identify uses; FILE:COLUMN prints the rates of one threshold.",
        check_by,
    ] = None,
    checkpoint: Checkpoint = None,
    overrides: SetDataset = None,
    *,
    chosen: MovedModelOptions,
    json: Json = False,
) -> None:
    """Find the threshold of verify, for a run, or of identify, for a gallery.

    For a run it is the similarity above which two images count as the same class,
    chosen on validation classes. For a gallery it is the probability above which
    an image gets a label, chosen on images whose label is left out.
    """
    kind, column = kind_of(source), column_of(by)
    of_run = {"--far": far, "--checkpoint": checkpoint, "--set": overrides}
    of_gallery = {"--fpir": fpir, "--strangers": strangers, "--near": near, "--where": where}
    check_options(source, kind, of_run | of_gallery)
    for name, moved in (("--run", chosen.run), ("--with", chosen.second)):
        if moved is not None and kind == "run":
            raise UserError(f"calibrate: {name} {moved}: names a run of a gallery, but {source} is a run; remove it")
    if where is not None and column is not None:
        raise UserError(f"calibrate: --by {by}: does not apply to --where {where}; leave one out")
    conditions = where_of(where)
    if kind == "run":
        _calibrate_run(source, far, checkpoint, overrides or [], chosen.device, column, conditions, json=json)
        return

    from dmlkit.evaluation.by_value import column_table
    from dmlkit.evaluation.calibration import plot_reliability
    from dmlkit.evaluation.rates_by_value import identification_rates_by_value
    from dmlkit.gallery.folder import GalleryFolder
    from dmlkit.identify.calibration import (
        LEAST_ACCEPTED,
        USUAL_FPIR,
        calibrate_by_value,
        calibrate_gallery,
        calibration_file,
    )

    model = chosen.choose(source)
    arguments: dict[str, Any] = {"fpir": fpir, "strangers": strangers, "near": near, "model": model, "bar": bars()}
    by_value, values = None, dict[str, "Identification | UserError"]()
    if column is not None and column[1] is None:
        result, values = calibrate_by_value(source, column[0], **arguments)
    else:
        if column is not None:
            column_table(*column, GalleryFolder(source).run)
        result = calibrate_gallery(source, **arguments, where=conditions)
        by_value = None if column is None else identification_rates_by_value(source, result, *column)
    title, share = "Guesses of identify", "share of the guesses that is right"
    plot = plot_reliability(result.reliability, source / "reliability.png", title=title, share=share)
    if json:
        data = {
            value: str(outcome) if isinstance(outcome, UserError) else outcome.plain()
            for value, outcome in values.items()
        }
        more = {"by": by_value and by_value.model_dump(mode="json"), "values": data}
        say_json(result.stamped() | {name: value for name, value in more.items() if value})
    else:
        print_identification(result, source)
        if fpir is None and result.requested > USUAL_FPIR:
            images = f"{result.fits[0].fpir.images:,} images of absent labels"
            say_lowest("FPIR", result.requested, images, USUAL_FPIR, LEAST_ACCEPTED)
        print_values(by_value, ["fpir", "fnir"])
        print_thresholds(values, by or "")
        say(f"written to {calibration_file(source, conditions)} and {plot}")
        option = f" --where {command_word(where)}" if where else ""
        say(f"next: dmlkit identify {command_word(source)} IMAGES{option}")


def print_identification(result: "Identification", gallery: Path) -> None:
    """Print the rates of identification, of single images and of groups, and the reliability of its probabilities."""
    first, rows = result.fits[0], [["similarity", "images", "least probability", "FPIR", "FNIR"]]
    for fit in result.fits:
        figures = (fit.threshold, fit.fpir.rate, fit.fnir.rate)
        rows.append([fit.similarity, str(fit.size), *(f"{figure:.3f}" for figure in figures)])
    print_table(rows, f"{gallery}, for one image and for groups of images (identify --by)")
    absent, present = (f"{rate.images:,} images of {rate.labels:,}" for rate in (first.fpir, first.fnir))
    say_prose(
        f"FPIR is the share of {absent} absent labels that get a label, where each label meets the threshold that the "
        f"others choose; FNIR is the share of {present} labels of the gallery that do not get their own"
    )
    if result.trained_labels and not result.is_optimistic:
        labels = counted(len(result.trained_labels), "label")
        say(f"left out of both: {labels} that the model was trained on")
    if first.fpir.interval and first.fnir.interval:
        ends = "FPIR {:.3f} to {:.3f}, FNIR {:.3f} to {:.3f}".format(*first.fpir.interval, *first.fnir.interval)
        say(f"on as many other labels: {ends} (95 %)")
    if first.fpir.rate > result.requested:
        say_prose(
            f"note: the requested FPIR of {result.requested:g} is not reached, because the highest probabilities are "
            "of images of one label; name more images of other labels with --strangers"
        )
    say(f"threshold: a label is given if its probability is at least {first.threshold:.3f}")
    say(f"without the threshold {first.guessed:.3f} of the best guesses are correct")
    say_reliability(result.reliability)
    if result.near is None:
        say_prose(
            "note: if the gallery has several pictures of one scene, new images are missed more often than the FNIR "
            "says; --near SIMILARITY leaves near-duplicates out together, and dmlkit duplicates "
            f"{command_word(gallery)} proposes the similarity"
        )
    if result.is_optimistic:
        say_prose(
            "note: these rates are optimistic: they are of labels that the model was trained on, which separate "
            "better than others; add other labels to the gallery, or name strangers with --strangers FOLDER"
        )


def print_thresholds(values: "dict[str, Identification | UserError]", column: str) -> None:
    """Print the threshold of each value of a column with its rates, and which values have too few images for one."""
    rows = [[column, "images", "labels", "least probability", "FPIR, 95 % interval", "FNIR, 95 % interval"]]
    requested, failed = list[str](), dict[str, UserError]()
    for value, outcome in values.items():
        if isinstance(outcome, UserError):
            failed[value] = outcome
            continue
        fit = outcome.fits[0]
        rates = (
            f"{rate.rate:.3f}" + ("  {:.3f} .. {:.3f}".format(*rate.interval) if rate.interval else "")
            for rate in (fit.fpir, fit.fnir)
        )
        rows.append([value, f"{outcome.images:,}", f"{fit.fnir.labels:,}", f"{fit.threshold:.3f}", *rates])
        requested.append(f"{value} {outcome.requested:g}")
    if requested:
        print_table(rows, f"per {column}, among the images of the same {column} alone")
        say_prose(f"requested FPIR: {some_of(requested)}")
    if failed:
        first, reason = next(iter(failed.items()))
        say_prose(f"note: identify takes the threshold of all images for {some_of([*failed])}; {first}: {reason}")


def say_lowest(rate: str, requested: float, items: str, usual: float, least: int) -> None:
    """Print that a rate is the lowest that some pairs or images allow."""
    needed = f"{usual:g} needs {least / usual:,.0f}"
    say_prose(f"requested {rate}: {requested:g}, the lowest that {items} allow ({needed})")


def say_reliability(reliability: "Reliability") -> None:
    """Print how far probabilities are from the shares that are right."""
    for name, value, ends in (
        ("expected calibration error", reliability.error, reliability.error_interval),
        ("Brier score", reliability.brier, reliability.brier_interval),
    ):
        interval = " ({:.3f} to {:.3f})".format(*ends) if ends else ""
        say(f"{name} of the probabilities: {value:.3f}{interval}")


def _calibrate_run(
    run: Path,
    far: float | None,
    checkpoint: "CheckpointName | None",
    overrides: list[str],
    device: str,
    column: tuple[str, Path | None] | None,
    where: "Where | None",
    *,
    json: bool,
) -> None:
    """Choose the threshold for pairs of a run, store it, and print its rates."""
    from dmlkit.evaluation.by_value import column_table
    from dmlkit.evaluation.calibration import LEAST_ACCEPTED, USUAL_FAR, calibrate_run, plot_reliability
    from dmlkit.evaluation.rates_by_value import pair_rates_by_value
    from dmlkit.recipe.file import plain
    from dmlkit.run_folder.folder import RunFolder

    ranks = ranks_of(device)
    if column is not None:
        column_table(*column, plain(RunFolder(run).recipe(overrides))["dataset"])
    threshold = calibrate_run(
        run, far=far, checkpoint=checkpoint, overrides=overrides, where=where, ranks=ranks, bar=bars()
    )
    by_value = None
    if column is not None:  # by all ranks, which share the embedding
        by_value = pair_rates_by_value(run, threshold, *column, overrides=overrides, ranks=ranks, bar=bars())
    if not ranks.is_global_zero:
        return
    reliability, written = threshold.probability.reliability, str(RunFolder(run).threshold_path)
    if reliability is not None:
        place = RunFolder(run).plots / "reliability.png"
        title, share = "Pairs of validation images", "share of the pairs that is of the same class"
        written += f" and {plot_reliability(reliability, place, title=title, share=share)}"
    if json:
        say_json(threshold.stamped() | ({} if by_value is None else {"by": by_value.model_dump(mode="json")}))
        return
    rows = [["split", "classes", "images", "same pairs", "different pairs", "FAR", "FRR"]]
    for name, rates in (("validation", threshold.validation), ("test", threshold.test)):
        if rates is not None:
            counts = (rates.classes, rates.images, rates.same, rates.different)
            rows.append([name, *(f"{count:,}" for count in counts), f"{rates.far:.2g}", f"{rates.frr:.2g}"])
    print_table(rows, f"{threshold.checkpoint} checkpoint of {run}")
    say(f"threshold: {threshold.similarity} >= {threshold.threshold:.6g} counts as the same class")
    if far is None and threshold.far > USUAL_FAR:
        pairs = f"{threshold.validation.different:,} pairs of different classes"
        say_lowest("FAR", threshold.far, pairs, USUAL_FAR, LEAST_ACCEPTED)
    print_far_elsewhere(threshold)
    if reliability is not None:
        say_reliability(reliability)
    print_values(by_value, ["far", "frr"])
    say(f"written to {written}")


def print_far_elsewhere(threshold: "Threshold") -> None:
    """Print the interval of the FAR on other classes, or that there are too few classes for one, or for the FAR."""
    from dmlkit.evaluation.calibration import least_far
    from dmlkit.metrics.statistics import LEAST_CLASSES

    classes = f"{threshold.validation.classes:,}"
    if threshold.far_interval is not None:
        low, high = threshold.far_interval
        say_prose(f"expected FAR on {classes} other classes: {low:.2g} to {high:.2g} (95 %, bootstrap over classes)")
        if threshold.test and not low <= threshold.test.far <= high:
            say_prose(f"note: the FAR on the test classes is {threshold.test.far:.2g}, outside this interval")
        return
    pairs, least_rate = least_far(threshold.validation.classes)
    if threshold.far < least_rate:
        these = f"{pairs} pairs of classes, and the least is 1 / {pairs}: use --far {least_rate:g}, or more classes"
        these = these if pairs > 1 else "a single pair of classes; use more classes"
        say_prose(f"note: {classes} classes cannot carry a FAR of {threshold.far:g}: they are {these}")
    say_prose(
        f"no interval for the FAR on other classes: it needs at least {LEAST_CLASSES} validation classes, got "
        f"{classes}; train with a larger dataset.validation_fraction"
    )
    if (test := threshold.test) and test.far > 2 * threshold.far:
        say_prose(f"note: the FAR on the test classes is {test.far:.2g}, not at most {threshold.far:g}")
