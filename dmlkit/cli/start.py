"""``dmlkit start``: a first recipe for your photos."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmlkit.cli.options import TRAIN, Debug, Device, checked, examples
from dmlkit.files.source import require_path

if TYPE_CHECKING:
    from rich.console import Console

    from dmlkit.loading.survey import Survey

app = typer.Typer()


@app.command(rich_help_panel=TRAIN, epilog=examples("dmlkit start photos/"))
def start(
    photos: Annotated[
        Path,
        typer.Argument(
            metavar="ROOT|TABLE",
            help="Folder with one subfolder per class, or table of images and labels.",
            callback=checked(partial(require_path, expected="a folder with one subfolder per class, or a table")),
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Recipe to write. Default: the name of ROOT with .yaml, in this folder.",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Inspect your photos and write a first recipe for them, with a comment on each choice."""
    from rich.console import Console

    from dmlkit.backbones.pretrained.at_hand import choose
    from dmlkit.cli.console import say
    from dmlkit.cli.progress import image_progress
    from dmlkit.distributed.launch import resolve_device
    from dmlkit.files.atomic import atomic_write
    from dmlkit.files.outputs import check_output
    from dmlkit.loading.survey import SAMPLE, dataset_at, survey
    from dmlkit.recipe.file import parse_recipe
    from dmlkit.recipe.start import Photos, is_starting_recipe, starting_recipe

    output = output or Path(f"{photos.resolve().stem}.yaml")
    check_output(output, is_starting_recipe, sources=[photos])
    console, config = Console(), dataset_at(photos)
    with image_progress(console, "measuring photos", SAMPLE) as advance:
        found = survey(config, advance)
    print_survey(found, str(photos), console)
    gpu = resolve_device(device)[0] != "cpu"
    backbone, at_hand = choose(gpu=gpu)
    setting = Photos(
        config, found.images["train"], found.classes["train"], found.names_validation, backbone, at_hand, gpu
    )
    text = starting_recipe(setting)
    parse_recipe(text, str(output))
    with atomic_write(output) as written:
        written.write_text(text, encoding="utf-8")
    say(
        console, f"{output}: {backbone.title}, {'all weights trained' if gpu else 'frozen, with a trained head'}; next:"
    )
    say(console, f"  dmlkit train {output} -o runs/{output.stem}")


def print_survey(found: "Survey", title: str, console: "Console") -> None:
    """Print one row per split, then the sizes of classes and images."""
    from dmlkit.cli.console import counted, print_table, say

    rows = [["split", "images", "classes"]]
    rows += [[split, f"{count:,}", f"{found.classes[split]:,}"] for split, count in found.images.items() if count]
    print_table(rows, console, title)
    smallest, median, largest = found.per_class
    say(console, f"images per training class: {smallest} to {largest}, median {median:g}")
    smallest, median, largest = found.sides
    say(console, f"shorter side: {smallest} to {largest} pixels, median {median:g}")
    if found.unreadable:
        say(
            console,
            f"{counted(found.unreadable, 'image', 'images')} of the sample could not be opened; run dmlkit data check",
            style="yellow",
        )
