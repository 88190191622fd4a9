"""``dmlkit gallery``: labeled embeddings to which images are added and from which they are removed."""

from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dmlkit.cli.console import bars, counted, fusion_line, print_table, say, say_json, say_prose, say_skipped
from dmlkit.cli.option_groups import BoxOptions, MovedModelOptions
from dmlkit.cli.options import APPS, AS_PARTNER, Checkpoint, Json, ModelDevice, RunPath, Writes, command, second_run
from dmlkit.files.escape import command_word, near_path
from dmlkit.files.labels import stated_label
from dmlkit.files.outputs import check_folder
from dmlkit.files.source import CREATING_MARK, LOCAL, require_addable, require_gallery, require_path

if TYPE_CHECKING:
    from dmlkit.gallery.files import GallerySummary
    from dmlkit.gallery.images import Incoming
    from dmlkit.vectors.fusion import ModelChoice

APPS[__name__] = typer.Typer(
    name="gallery",
    no_args_is_help=True,
    help="Keep labeled embeddings in a folder; add and remove images, and restore old versions.",
)
GalleryPath = Annotated[Path, "GALLERY", "Gallery folder, written by gallery create.", require_gallery]
IMAGES = "Image, folder of images (subfolders are labels), or table with columns path and label."
Label = Annotated[str | None, "LABEL", "Label of all images, instead of the names of their folders."]
NOT_PRINTED = ("versions", "numbers", "others")
"""Fields of a gallery's manifest: versions, the count of all images, and the models of other versions."""
MOST_LABELS = 20


@dataclass(frozen=True)
class KeptModelOptions:
    """Options on the model whose embeddings a gallery keeps."""

    checkpoint: Checkpoint = None
    second: Annotated[
        Path | None,
        "RUN|local",
        "Add a second similarity, weighted by validation classes: that of a second run of the same dataset, or of the "
        "patches of the 100 nearest images, which the gallery keeps (local). For a run in a folder of this name, write "
        "./local.",
        second_run(LOCAL),
        AS_PARTNER,
    ] = None
    device: ModelDevice = "auto"

    def choose(self, run: Path) -> "ModelChoice":
        """Return the model of a run, and print the weight of a second one, see `choose_second`."""
        from dmlkit.vectors.fusion import ModelChoice

        fusion = None
        if self.second is not None:
            from dmlkit.distributed.launch import start_ranks
            from dmlkit.evaluation.second import choose_second

            ranks = start_ranks(self.device)
            fusion = choose_second(run, self.second, checkpoint=self.checkpoint, ranks=ranks, bar=bars())
            say(fusion_line(fusion.model_dump()))
        return ModelChoice(checkpoint=self.checkpoint, fusion=fusion, device=self.device)


@command("dmlkit gallery create runs/demo photos/ -o galleries/birds")
def create(
    run: RunPath,
    images: Annotated[Path | None, "IMAGES", f"{IMAGES} Default: an empty gallery.", require_addable] = None,
    /,
    *,
    output: Annotated[
        Path, "FOLDER", "Folder to write.", Writes(check_folder, "an interrupted gallery", CREATING_MARK)
    ],
    label: Label = None,
    boxes: BoxOptions,
    thumbnails: Annotated[bool, "Store small pictures, so that HTML pages do not need the files."] = False,
    threshold: Annotated[
        float | None,
        "SIMILARITY",
        "Similarity below which identify reports an image as unknown. Default: use what calibrate finds.",
    ] = None,
    chosen: KeptModelOptions,
) -> None:
    """Create a gallery from images embedded by a run, or by two."""
    from dmlkit.gallery.change import GallerySettings, create_gallery

    model = chosen.choose(run)
    incoming = create_gallery(
        run,
        images,
        output,
        label=label,
        boxes=boxes.read(),
        settings=GallerySettings(thumbnails, threshold),
        model=model,
        bar=bars(),
    )
    print_incoming(incoming, output)
    use = f"identify {command_word(output)} IMAGES" if incoming.added else f"gallery add {command_word(output)} IMAGES"
    say(f"next: dmlkit {use}")


@command("dmlkit gallery add galleries/birds more/ --label robin")
def add(
    gallery: GalleryPath,
    images: Annotated[Path, "IMAGES", IMAGES, require_addable],
    /,
    label: Label = None,
    *,
    boxes: BoxOptions,
    chosen: MovedModelOptions,
) -> None:
    """Add images; those that are already in the gallery are reported and skipped."""
    from dmlkit.gallery.change import add_images

    incoming = add_images(gallery, images, label=label, boxes=boxes.read(), model=chosen.choose(gallery), bar=bars())
    print_incoming(incoming, gallery)


def print_incoming(incoming: "Incoming", gallery: Path) -> None:
    """Print how many images were added, and which were not."""
    if incoming.resumed:
        say(f"{counted(incoming.resumed, 'image was', 'images were')} embedded before")
    say(f"{counted(incoming.added, 'image')} added to {gallery}")
    if incoming.labeled:
        say(f"{len(incoming.labeled):,} of them were there without a label")
    if none := incoming.unlabeled:
        say(f"note: {none:,} without a label, which identify leaves out; --label names one")
    say_skipped(incoming.repeated, "skipped: already in the gallery")
    say_skipped(incoming.skipped, "skipped: could not be read")


@command("dmlkit gallery remove galleries/birds --label robin")
def remove(
    gallery: GalleryPath,
    images: Annotated[
        list[str] | None, "IMAGE", "Images to remove: ids, or the files from which they were added."
    ] = None,
    /,
    label: Annotated[list[str] | None, "LABEL", "Remove all images with this label. Repeatable."] = None,
) -> None:
    """Remove images; gallery restore can undo this."""
    from dmlkit.gallery.change import remove_images

    count = remove_images(gallery, labels=label or [], images=images or [])
    say(f"{counted(count, 'image')} removed from {gallery}")


@command("dmlkit gallery rename galleries/birds robyn robin")
def rename(
    gallery: GalleryPath,
    old: Annotated[str, "OLD", "Label that some images have."],
    new: Annotated[str, "NEW", "Their new label; if others have it already, both become one label."],
    /,
) -> None:
    """Rename a label, or merge two that turned out to be one individual; gallery restore can undo this."""
    from dmlkit.gallery.change import rename_label

    renamed, others = rename_label(gallery, old, new)
    merged = f", which {counted(others, 'image')} had before: {renamed + others:,} now" if others else ""
    before, after = stated_label(old, "OLD"), stated_label(new, "NEW")
    say(f"{counted(renamed, 'image')} of {gallery} renamed from {before} to {after}{merged}")


@command("dmlkit gallery info galleries/birds")
def info(
    gallery: GalleryPath,
    /,
    verify: Annotated[bool, "Read all files and compare them with their checksums."] = False,
    json: Json = False,
) -> None:
    """Print the labels, images, version, model and index of a gallery."""
    from dmlkit.gallery.files import IDENTIFICATION, CalibrationSummary, GallerySummary, contents_of

    summary = GallerySummary.of(gallery)
    state = contents_of(gallery, summary)
    if verify:
        from dmlkit.gallery.folder import GalleryFolder

        GalleryFolder(gallery).check()
    threshold = _threshold_of_identify(gallery, summary)
    if json:
        data = state | ({"verified": True} if verify else {})
        kept = {key: value for key, value in summary.stamped().items() if key not in NOT_PRINTED}
        say_json(data | kept | {"threshold": threshold})
        return
    labels = state["labels"]
    if labels:
        shown = [[label, f"{count:,}"] for label, count in islice(labels.items(), MOST_LABELS)]
        print_table([["label", "images"], *shown])
    if len(labels) > MOST_LABELS:
        say(f"the first {MOST_LABELS} labels are shown; --json contains all")
    images = f"{counted(state['images'], 'image')} with {counted(len(labels), 'label')}"
    say(f"{images}, {state['without_label']:,} without a label; version {state['version']}")
    model = summary.model
    say(f"{summary.dim} dimensions on {summary.manifold['name']}, similarity: {summary.similarity}")
    say_prose(f"{model['checkpoint']} weights {model['fingerprint'][:12]} of {near_path(summary.run)}")
    for added in filter(None, (summary.fusion, summary.local)):
        say(fusion_line(added))
    floor = "none" if threshold is None else f"{threshold:.6g}"
    stored = gallery / IDENTIFICATION
    calibration = CalibrationSummary.read(stored) if stored.exists() else None
    probabilities = "not calibrated"
    if calibration is not None and calibration.gallery_model == summary.current:
        probabilities = f"calibrated, least one {calibration.fits[0]['threshold']:.3f}"
    say(f"thumbnails: {'yes' if summary.thumbnails else 'no'}")
    say(f"similarity threshold: {floor}; probabilities of identify: {probabilities}")
    index = summary.approximate
    if index is None:
        say("index: none; all searches are exact")
    else:
        left_out = counted(state["not_indexed"], "image is", "images are")
        say(f"index: {index.kind}, measured recall {index.recall:.4f}; {left_out} not in the index")
    if verify:
        say("verified: all files match their checksums")


def _threshold_of_identify(gallery: Path, summary: "GallerySummary") -> float | None:
    """Return the threshold given for a gallery, or that of its run, which may have been calibrated since."""
    from dmlkit.run_folder.folder import RunFolder, find_run

    run = None if summary.threshold_is_own else find_run(Path(summary.run), gallery)
    if run is None or not RunFolder(run).threshold_path.exists():
        return summary.threshold
    from dmlkit.run_folder.threshold import threshold_value  # with torch

    return threshold_value(run, summary.model["fingerprint"], summary.threshold)


@command("dmlkit gallery history galleries/birds")
def history(gallery: GalleryPath, /, json: Json = False) -> None:
    """List the versions that gallery restore can restore."""
    from dmlkit.gallery.files import GallerySummary

    summary = GallerySummary.of(gallery)
    versions, run_of = summary.versions, {name: str(model["run"]) for name, model in summary.others.items()}
    runs = [run_of.get(version.model, summary.run) for version in versions]
    if json:
        entries = [
            {"version": version.number, "time": version.time.isoformat(), "images": version.images}
            for version in versions
        ]
        say_json([entry | {"run": run} for entry, run in zip(entries, runs, strict=True)])
        return
    rows = [
        [str(version.number), f"{version.time:%Y-%m-%d %H:%M:%S}", f"{version.images:,}", f"{version.images - last:+,}"]
        for version, last in zip(versions, [0, *(version.images for version in versions)], strict=False)
    ]
    header = ["version", "time", "images", "change"]
    if len(set(runs)) > 1:
        header, rows = [*header, "run"], [[*row, near_path(run)] for row, run in zip(rows, runs, strict=True)]
    print_table([header, *rows])


@command("dmlkit gallery restore galleries/birds 3")
def restore(
    gallery: GalleryPath, version: Annotated[int, "VERSION", "Number of a version, as listed by gallery history."], /
) -> None:
    """Restore an old version; it becomes the newest version."""
    from dmlkit.gallery.change import restore_version
    from dmlkit.gallery.files import GallerySummary

    count = restore_version(gallery, version)
    summary = GallerySummary.of(gallery)
    model = f", embedded with {near_path(summary.run)}" if summary.others else ""
    say(f"restored version {version} of {gallery}: {counted(count, 'image')}{model}")


@command("dmlkit gallery migrate galleries/birds runs/new")
def migrate(
    gallery: GalleryPath,
    run: RunPath,
    images: Annotated[
        Path | None,
        "IMAGES",
        "Folder that has the images of the gallery now, if they have moved.",
        partial(require_path, expected="the folder that has the images now"),
    ] = None,
    /,
    *,
    chosen: KeptModelOptions,
) -> None:
    """Embed all images again with a newer run, and replace the old embeddings when all are done."""
    from dmlkit.gallery.migrate import migrate_gallery

    migrated = migrate_gallery(gallery, run, images, model=chosen.choose(run), bar=bars())
    count = counted(migrated.images, "image")
    if not migrated.is_new:
        say(f"{gallery} has the embeddings of {run} already: {count}, version {migrated.version}")
        return
    if migrated.resumed:
        say(f"{counted(migrated.resumed, 'image was', 'images were')} embedded before")
    say(f"{count} of {gallery} embedded with {run}: version {migrated.version}")
    say(f"to return to the old embeddings: dmlkit gallery restore {command_word(gallery)} {migrated.before}")
    used = "the threshold of the new run for pairs is used" if migrated.threshold is not None else "no image is unknown"
    say("the old model's thresholds and probabilities do not hold for the new one, and are not used;")
    say(f"run dmlkit calibrate {command_word(gallery)}; until then {used}")
    if migrated.lost is not None:
        say(f"the new embeddings have no {migrated.lost} to compare; --with keeps them")
    if migrated.index is not None:
        say(f"searches are exact until you run dmlkit gallery index {command_word(gallery)} {migrated.index}")


@command("dmlkit gallery compact galleries/birds")
def compact(gallery: GalleryPath, /) -> None:
    """Merge small files, add all images to the index, and delete versions replaced over 7 days ago."""
    from dmlkit.gallery.change import compact_gallery

    compact_gallery(gallery)
    say(f"{gallery} compacted")


@command("dmlkit gallery index galleries/birds --method ivf_hnsw_sq --recall 0.95")
def index(
    gallery: GalleryPath,
    /,
    method: Annotated[
        Literal["ivf_pq", "ivf_hnsw_sq", "int8", "binary"],
        "METHOD",
        "What the index keeps of a vector: compact codes (ivf_pq), a byte per number (int8) or a bit (binary); or a "
        "byte per number in a graph (ivf_hnsw_sq), which takes longer to build. Full vectors order the candidates.",
    ] = "ivf_pq",
    recall: Annotated[float, "SHARE", "Share of the 10 nearest images that a search must find, 0 to 1."] = 0.99,
) -> None:
    """Build an approximate index for faster search and identify, and measure its recall."""
    from dmlkit.gallery.index import index_gallery
    from dmlkit.nearest.search import MARGIN

    built = index_gallery(gallery, method, recall)
    parts = "" if method == "ivf_hnsw_sq" else f"{counted(built.index.nprobes, 'part')}, and "  # a graph has none
    read = f"{parts}{built.index.candidates:.3g} x (k + {MARGIN}) images for k neighbors"
    say(f"{method}: built in {built.build_seconds:.1f} s; a search reads {read}")
    queries = f"{built.queries:,} images of the gallery as queries"
    say(f"recall {built.index.recall:.4f} of the 10 nearest, with {queries}")
    say(f"{built.bytes_per_image:.0f} bytes per image in the index; a full vector: {built.full_bytes}")
    say(f"{built.milliseconds:.3f} ms per query; exact search: {built.exact_milliseconds:.3f} ms")
