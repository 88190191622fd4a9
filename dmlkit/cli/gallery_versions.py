"""``dmlkit gallery history``, ``restore`` and ``migrate``: versions of a gallery, and the models that embedded them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from dmlkit.cli.console import bars, counted, print_table, say, say_json
from dmlkit.cli.options import (
    Checkpoint,
    Json,
    ModelDevice,
    RunPath,
    argument,
    existing,
    second_option,
    with_options,
)
from dmlkit.files.escape import command_word, near_path
from dmlkit.files.source import LOCAL, SIFT, require_gallery

if TYPE_CHECKING:
    from dmlkit.gallery.migrate import Migrated
    from dmlkit.vectors.fusion import ModelChoice
    from dmlkit.vectors.progress_bar import Bar

GalleryPath = Annotated[Path, argument("GALLERY", "Gallery folder, written by gallery create.", check=require_gallery)]


@dataclass(frozen=True)
class KeptModelOptions:
    """Options on the model whose embeddings a gallery keeps."""

    checkpoint: Checkpoint = None
    second: Annotated[
        Path | None,
        second_option(
            "RUN|local|sift",
            "Add a second similarity, weighted by validation classes: that of a second run of the same dataset, or of "
            "the patches (local) or keypoints (sift) of the 100 nearest images, which the gallery keeps. For a run in "
            "a folder of such a name, write ./local or ./sift.",
            LOCAL,
            SIFT,
        ),
    ] = None
    device: ModelDevice = "auto"

    def choose(self, run: Path, bar: "Bar") -> "ModelChoice":
        """Return the model of a run, see `dmlkit.evaluation.run.choose_second`."""
        from dmlkit.vectors.fusion import ModelChoice

        fusion = None
        if self.second is not None:
            from dmlkit.distributed.launch import start_ranks
            from dmlkit.evaluation.second import choose_second

            fabric = start_ranks(self.device)
            fusion = choose_second(run, self.second, checkpoint=self.checkpoint, fabric=fabric, bar=bar)
        return ModelChoice(checkpoint=self.checkpoint, fusion=fusion, device=self.device)


@with_options
def history(gallery: GalleryPath, json: Json = False) -> None:
    """List the versions that gallery restore can restore."""
    from dmlkit.gallery.files import read_summary

    summary = read_summary(gallery)
    versions, runs = summary.versions, [summary.run_of(one) for one in summary.versions]
    if json:
        say_json(
            [
                {"version": one.number, "time": one.time.isoformat(), "images": one.images, "run": run}
                for one, run in zip(versions, runs, strict=True)
            ]
        )
        return
    before = [0, *(one.images for one in versions)]
    rows = [
        [str(one.number), f"{one.time:%Y-%m-%d %H:%M:%S}", str(one.images), f"{one.images - last:+d}"]
        for one, last in zip(versions, before, strict=False)
    ]
    header = ["version", "time", "images", "change"]
    if len(set(runs)) > 1:
        header, rows = [*header, "run"], [[*row, near_path(run)] for row, run in zip(rows, runs, strict=True)]
    print_table([header, *rows], Console())


@with_options
def restore(
    gallery: GalleryPath,
    version: Annotated[int, argument("VERSION", "Number of a version, as listed by gallery history.")],
) -> None:
    """Restore an old version; it becomes the newest version."""
    from dmlkit.gallery.change import restore_version
    from dmlkit.gallery.files import MANIFEST, GallerySummary

    count = restore_version(gallery, version)
    summary = GallerySummary.read(gallery / MANIFEST)
    model = f", embedded with {near_path(summary.run)}" if summary.others else ""
    say(Console(), f"restored version {version} of {gallery}: {counted(count, 'image', 'images')}{model}")


@with_options
def migrate(
    gallery: GalleryPath,
    run: RunPath,
    images: Annotated[
        Path | None,
        argument(
            "IMAGES",
            "Folder that has the images of the gallery now, if they have moved.",
            callback=existing("the folder that has the images now"),
        ),
    ] = None,
    *,
    chosen: KeptModelOptions,
) -> None:
    """Embed all images again with a newer run, and replace the old embeddings when all are done."""
    from dmlkit.gallery.migrate import migrate_gallery

    console = Console()
    model = chosen.choose(run, bars(console))
    found = migrate_gallery(gallery, run, images, model=model, bar=bars(console))
    print_migrated(found, gallery, run, console)


def print_migrated(found: "Migrated", gallery: Path, run: Path, console: Console) -> None:
    """Print what has changed, how to undo it, and what to run next."""
    images = counted(found.images, "image", "images")
    if not found.is_new:
        say(console, f"{gallery} has the embeddings of {run} already: {images}, version {found.version}")
        return
    if found.resumed:
        say(console, f"{counted(found.resumed, 'image', 'images')} embedded before the interruption")
    say(console, f"{images} of {gallery} embedded with {run}: version {found.version}")
    say(console, f"to return to the old embeddings: dmlkit gallery restore {command_word(gallery)} {found.before}")
    used = "the threshold of the new run for pairs is used" if found.threshold is not None else "no image is unknown"
    say(console, "the old model's thresholds and probabilities do not hold for the new one, and are not used;")
    say(console, f"run dmlkit calibrate {command_word(gallery)}; until then {used}")
    if found.lost is not None:
        say(console, f"the new embeddings have no {found.lost} to compare; --with keeps them")
    if found.index is not None:
        say(console, f"searches are exact until you run dmlkit gallery index {command_word(gallery)} {found.index}")
