"""``dmlkit calibrate``: a similarity threshold for "same class"."""

from typing import TYPE_CHECKING, Annotated

import typer

from dmlkit.cli.options import TRAIN, Checkpoint, Debug, Device, Json, Plugins, RunPath, SetDataset, examples

if TYPE_CHECKING:
    from dmlkit.run_folder.threshold import Threshold

app = typer.Typer()


@app.command(rich_help_panel=TRAIN, epilog=examples("dmlkit calibrate runs/demo --far 1e-3"))
def calibrate(
    run: RunPath,
    far: Annotated[
        float,
        typer.Option(
            metavar="RATE", help="False accept rate: at most this share of different-class pairs counts as same."
        ),
    ] = 1e-3,
    checkpoint: Checkpoint = None,
    overrides: SetDataset = None,
    json: Json = False,
    device: Device = "auto",
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Find the similarity above which two images count as the same class, and store it in the run.

    The threshold is chosen on validation classes. verify and identify use it, and new manifests contain it.
    """
    from rich.console import Console

    from dmlkit.cli.console import print_table, say, say_json
    from dmlkit.cli.progress import bars
    from dmlkit.distributed.launch import start_fabric
    from dmlkit.evaluation.calibration import calibrate_run
    from dmlkit.metrics.statistics import LEAST_CLASSES

    fabric = start_fabric(device)
    console = Console(stderr=json, quiet=not fabric.is_global_zero)
    found = calibrate_run(
        run, far=far, checkpoint=checkpoint, overrides=overrides or [], fabric=fabric, bar=bars(console)
    )
    if not fabric.is_global_zero:
        return
    if json:
        say_json(found.stamped())
        return
    print_table(rate_rows(found), console, f"{found.checkpoint} checkpoint of {run}")
    say(console, f"threshold: {found.similarity} >= {found.threshold:.6g} counts as the same class")
    classes = f"{found.validation.classes:,}"
    if found.far_interval is None:
        say(
            console,
            f"no interval for the FAR on other classes: it needs at least {LEAST_CLASSES} validation classes, got "
            f"{classes}; train with a larger dataset.validation_fraction",
        )
    else:
        low, high = found.far_interval
        say(
            console,
            f"expected FAR on {classes} other classes: {low:.2g} to {high:.2g} (95 %, bootstrap over classes)",
        )
        if found.test and not low <= found.test.far <= high:
            say(console, f"note: the FAR on the test classes is {found.test.far:.2g}, outside this interval")
    say(console, f"written to {run / 'threshold.json'}")


def rate_rows(found: "Threshold") -> list[list[str]]:
    """Return one row per split with its counts and both error rates."""
    rows = [["split", "classes", "images", "same pairs", "different pairs", "FAR", "FRR"]]
    for name, rates in (("validation", found.validation), ("test", found.test)):
        if rates is not None:
            counts = (rates.classes, rates.images, rates.same, rates.different)
            rows.append([name, *(f"{count:,}" for count in counts), f"{rates.far:.2g}", f"{rates.frr:.2g}"])
    return rows
