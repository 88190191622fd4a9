"""``dmlkit start``: a first recipe for your photos."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dmlkit.cli.console import bars, counted, print_table, say, say_prose
from dmlkit.cli.options import TRAIN, Device, Writes, argument, examples, option, with_debug
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import command_word, printable
from dmlkit.files.outputs import check_file, writing
from dmlkit.files.source import require_dataset

if TYPE_CHECKING:
    from dmlkit.datasets.base import DatasetConfig
    from dmlkit.loading.check import Survey
    from dmlkit.training.estimate import Estimate

app = typer.Typer()
WIDTH = 80  # columns of a terminal


@app.command(rich_help_panel=TRAIN, epilog=examples("dmlkit start photos/"))
@with_debug
def start(
    photos: Annotated[
        Path,
        argument(
            "ROOT|TABLE", "Folder with one subfolder per class, or table of images and labels.", check=require_dataset
        ),
    ],
    output: Annotated[
        Path | None,
        Writes(check_file),
        option(
            "FILE", "Recipe to write. Default: the name of ROOT with .yaml, in the current folder.", "--output", "-o"
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Inspect your photos and write a first recipe for them, with a comment on each choice."""
    if output is None:
        output = Path(f"{photos.resolve().stem}.yaml")
        if output.exists():
            raise UserError(f"{output}: exists already; choose another name with -o, or replace it with -o {output}")

    from dmlkit.backbones.timm_models import choose
    from dmlkit.distributed.launch import resolve_device
    from dmlkit.loading.check import dataset_at, survey
    from dmlkit.recipe.file import parse_recipe
    from dmlkit.recipe.start import Photos, starting_recipe
    from dmlkit.training.estimate import estimate_training

    console, config = Console(), dataset_at(photos)
    print_nesting(config, console)
    found = survey(config, bars(console))
    print_survey(found, str(photos), console)
    print_several_labels(config, found, console)
    gpu = resolve_device(device)[0] != "cpu"
    backbone, at_hand = choose(gpu=gpu)
    images, classes, own = found.images["train"], found.classes["train"], found.names_validation
    setting = Photos(found.dataset, images, classes, found.trained, own, backbone, at_hand, gpu)
    text = starting_recipe(setting)
    recipe = parse_recipe(text, str(output))
    try:
        estimate = estimate_training(recipe, device, at_hand=at_hand)
    except UserError as error:
        estimated = f"training time is not known: {error}"
    else:
        estimated = shown(estimate)
    with writing(output), atomic_write(output) as written:
        written.write_text(text, encoding="utf-8")
    say(console, f"wrote {output}: {recipe.training.epochs} epochs")
    say(console, f"{backbone.title}, {'all weights trained' if gpu else 'frozen, with a trained head'}")
    say_prose(console, estimated)
    run = command_word(f"runs/{output.stem}")
    say(console, f"next: dmlkit train {command_word(output)} -o {run}")
    say(console, f"then: dmlkit final {run}, to train on every class")


def print_several_labels(config: "DatasetConfig", found: "Survey", console: Console) -> None:
    """Print that labels of a table with a | are taken as one class each; half of the classes are looked at."""
    from dmlkit.datasets.table import TableConfig

    joined = next((name for names in found.held_out.values() for name in names if "|" in name), None)
    if isinstance(config, TableConfig) and joined is not None:
        say_prose(
            console,
            f'{joined} is taken as the name of one class; if it is several labels of an image, write separator: "|" '
            "below dataset in the recipe, and choose a loss that compares pairs, see docs/data.md",
        )


def print_survey(found: "Survey", title: str, console: Console) -> None:
    """Print one row per split, the sizes of classes and images, what is not trained on, and what is not used."""
    images, classes = {**found.images}, {**found.classes}
    if "validation" in found.held_out and not found.names_validation:  # cut from the training classes
        images |= {"train": found.trained, "validation": found.images["train"] - found.trained}
        held_out = len(found.held_out["validation"])
        classes |= {"train": found.classes["train"] - held_out, "validation": held_out}
    rows = [["split", "images", "classes"]]
    rows += [[split, f"{count:,}", f"{classes[split]:,}"] for split, count in images.items() if count]
    print_table(rows, console, title)
    smallest, median, largest = found.per_class
    say(console, f"images per training class: {smallest} to {largest}, median {median:g}")
    smallest, median, largest = found.sides
    say(console, f"shorter side: {smallest} to {largest} pixels, median {median:g}")
    for split, names in found.held_out.items():
        say(console, with_names(f"not trained on: {len(names)} {split} classes", names))
    if "validation" not in found.held_out:
        say(console, "no validation: too few training classes to hold some out")
    for note in found.notes:
        say_prose(console, note)
    if found.unreadable:
        opened = f"of {counted(found.measured, 'image', 'images')}"
        what = f"cannot be opened: {len(found.unreadable)} {opened}"
        say(console, with_names(what, found.unreadable), style="yellow")
        say(console, "train stops at such images: remove them, or set on_bad_image: skip", style="yellow")


def print_nesting(config: "DatasetConfig", console: Console) -> None:
    """Print that the outermost of nested folders are the classes, and how to choose the innermost."""
    from dmlkit.datasets.folder import FolderConfig, folder_levels, is_split

    if not isinstance(config, FolderConfig) or config.levels:
        return
    root = Path(config.root)
    found = folder_levels(root / "train" if is_split(root) else root)
    if len(found) == 1:
        return
    depth, path = len(found), found[-1][0]
    levels = ", ".join(f"level{number}" for number in range(1, depth)) + ", class"
    say_prose(
        console,
        f"the folders are nested, e.g. {path}, and the outermost are the classes; for the innermost, write levels: "
        f"[{levels}] (names of your choice) below dataset in the recipe, see docs/guides/hierarchy.md",
    )


def with_names(text: str, names: Sequence[str]) -> str:
    """Return a line of at most `WIDTH` columns: a text and as many of the first names as fit.

    Example:
        >>> with_names("3 classes", ["crow", "dove", "finch"])
        '3 classes: crow, dove, finch'
        >>> with_names("90 classes", ["crow " * 5, "dove " * 10, "finch"] * 30)
        '90 classes: crow crow crow crow crow , ...'
    """
    line = f"{text}: "
    for place, name in enumerate(map(printable, names)):
        is_last = place == len(names) - 1
        if len(line) + len(name) > WIDTH - (0 if is_last else len(", ...")):
            return f"{line}..."
        line += name if is_last else f"{name}, "
    return line


def shown(estimate: "Estimate") -> str:
    """Return how long a recipe trains on this machine, as text."""
    minutes = max(1, round(estimate.seconds / 60))
    time = f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"
    return f"training takes about {time} on this machine ({estimate.images_per_second:.3g} images/s)"
