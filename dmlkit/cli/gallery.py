"""``dmlkit gallery``: labelled embeddings that grow and shrink."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dmlkit.cli.options import Checkpoint, Debug, Device, Json, Plugins, RunPath

if TYPE_CHECKING:
    from rich.console import Console

    from dmlkit.embedding.gallery.incoming import Incoming

app = typer.Typer(
    name="gallery", no_args_is_help=True, help="Keep labelled embeddings in a folder that grows and remembers."
)
GalleryPath = Annotated[Path, typer.Argument(metavar="GALLERY", help="Folder that gallery create wrote.")]
IMAGES = "An image; a folder, whose subfolders are labels; or a table with path and label."
Label = Annotated[str | None, typer.Option(help="Label of all images, instead of their folders.", show_default=False)]
MOST_TOLD = 5  # pictures that were left out


@app.command(epilog="Example:  dmlkit gallery create runs/demo photos/ -o galleries/birds")
def create(
    run: RunPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.", show_default=False)],
    images: Annotated[Path | None, typer.Argument(metavar="[IMAGES]", help=f"{IMAGES} Without: none yet.")] = None,
    label: Label = None,
    thumbnails: Annotated[bool, typer.Option("--thumbnails", help="Keep small pictures, for pages.")] = False,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Similarity below which identify says unknown; by default what calibrate found.", show_default=False
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Create a gallery of the embeddings of a run, whole or not at all."""
    from rich.console import Console

    from dmlkit.cli.progress import bars
    from dmlkit.embedding.gallery.change import create_gallery

    console = Console()
    incoming = create_gallery(
        run,
        images,
        output,
        label=label,
        thumbnails=thumbnails,
        threshold=threshold,
        checkpoint=checkpoint,
        device=device,
        bar=bars(console),
    )
    tell(incoming, output, console)


@app.command(epilog="Example:  dmlkit gallery add galleries/birds more/ --label robin")
def add(
    gallery: GalleryPath,
    images: Annotated[Path, typer.Argument(metavar="IMAGES", help=IMAGES)],
    label: Label = None,
    run: Annotated[Path | None, typer.Option(help="The gallery's run, if it has moved.", show_default=False)] = None,
    device: Device = "auto",
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Add images; a picture that is there already is told, and not repeated."""
    from rich.console import Console

    from dmlkit.cli.progress import bars
    from dmlkit.embedding.gallery.change import add_images

    console = Console()
    incoming = add_images(gallery, images, label=label, run=run, device=device, bar=bars(console))
    tell(incoming, gallery, console)


def tell(incoming: "Incoming", gallery: Path, console: "Console") -> None:
    """What came of images, and those that were left out."""
    from dmlkit.cli.console import counted, say

    say(console, f"{counted(incoming.added, 'image', 'images')} added to {gallery}")
    for lines, told in (
        (incoming.repeated, "there already, and not added again"),
        (incoming.skipped, "left out: they could not be read"),
    ):
        if lines:
            say(console, f"{counted(len(lines), 'image', 'images')} {told}")
        for line in lines[:MOST_TOLD]:
            say(console, f"  {line}")
        if len(lines) > MOST_TOLD:
            say(console, f"  and {len(lines) - MOST_TOLD} more")


@app.command(epilog="Example:  dmlkit gallery remove galleries/birds --label robin")
def remove(
    gallery: GalleryPath,
    label: Annotated[list[str] | None, typer.Option(help="All images of it. Repeatable.")] = None,
    id: Annotated[list[str] | None, typer.Option(help="The image with it. Repeatable.")] = None,  # noqa: A002
    path: Annotated[list[str] | None, typer.Option(help="Images added from this file. Repeatable.")] = None,
    debug: Debug = False,
) -> None:
    """Take images out; gallery restore brings them back."""
    from rich.console import Console

    from dmlkit.cli.console import counted, say
    from dmlkit.embedding.gallery.change import remove_images

    count = remove_images(gallery, labels=label or [], ids=id or [], paths=path or [])
    say(Console(), f"{counted(count, 'image', 'images')} removed from {gallery}")


@app.command(epilog="Example:  dmlkit gallery info galleries/birds")
def info(
    gallery: GalleryPath,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all rows, and compare them with their checksums.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a gallery holds: images, labels, version, and the model that embeds."""
    from rich.console import Console

    from dmlkit.cli.console import print_table, say, say_json
    from dmlkit.embedding.gallery.folder import GalleryFolder

    found = GalleryFolder(gallery)
    if verify:
        found.check()
    manifest, counts = found.manifest, found.label_counts()
    unlabelled = counts.pop(None, 0)
    labels = {str(label): count for label, count in sorted(counts.items(), key=lambda one: str(one[0]))}
    if json:
        told = {"images": len(found), "without_label": unlabelled, "labels": labels, "version": found.version}
        told["not_indexed"] = found.not_indexed()
        if verify:
            told["verified"] = found.has_checksums
        say_json({**told, **manifest.model_copy(update={"contents": {}, "files": {}}).stamped()})
        return
    console = Console()
    if labels:
        print_table([["label", "images"], *([label, str(count)] for label, count in labels.items())], console)
    say(console, f"{len(found)} images of {len(labels)} labels, {unlabelled} without one; version {found.version}")
    say(console, f"{manifest.dim} coordinates on {manifest.manifold.name}, compared by {manifest.similarity}")
    say(console, f"{manifest.model.checkpoint} weights {manifest.model.fingerprint[:12]} of {manifest.run}")
    floor = "none" if manifest.threshold is None else manifest.threshold
    say(console, f"thumbnails: {'yes' if manifest.thumbnails else 'no'}; threshold: {floor}")
    index = found.approximate
    outside = f"{found.not_indexed()} images are not in it" if index else "every search is exact"
    say(console, f"index: {f'{index.kind}, measured recall {index.recall:.4f}' if index else 'none'}; {outside}")
    if verify:
        without = "all rows can be read, but have no checksums: this gallery was created before they were kept"
        say(console, "verified: all rows are what was written" if found.has_checksums else f"not verified: {without}")


@app.command(epilog="Example:  dmlkit gallery history galleries/birds")
def history(gallery: GalleryPath, json: Json = False, debug: Debug = False) -> None:
    """All versions that restore can bring back."""
    from rich.console import Console

    from dmlkit.cli.console import print_table, say_json
    from dmlkit.embedding.gallery.folder import history as versions_of

    versions = versions_of(gallery)
    if json:
        say_json([{"version": one.number, "time": one.time.isoformat(), "images": one.images} for one in versions])
        return
    before = [0, *(one.images for one in versions)]
    rows = [
        [str(one.number), f"{one.time:%Y-%m-%d %H:%M:%S}", str(one.images), f"{one.images - last:+d}"]
        for one, last in zip(versions, before, strict=False)
    ]
    print_table([["version", "time", "images", "change"], *rows], Console())


@app.command(epilog="Example:  dmlkit gallery restore galleries/birds 3")
def restore(
    gallery: GalleryPath,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="A number of gallery history.")],
    debug: Debug = False,
) -> None:
    """Bring an old version back, as a new one."""
    from rich.console import Console

    from dmlkit.cli.console import say
    from dmlkit.embedding.gallery.change import restore_version

    count = restore_version(gallery, version)
    say(Console(), f"{gallery} is as at version {version} again: {count} images")


@app.command(epilog="Example:  dmlkit gallery compact galleries/birds")
def compact(gallery: GalleryPath, debug: Debug = False) -> None:
    """Put small files together and all images into the index; forget versions older than 7 days."""
    from rich.console import Console

    from dmlkit.cli.console import say
    from dmlkit.embedding.gallery.change import compact_gallery

    compact_gallery(gallery)
    say(Console(), f"{gallery} is compact")


@app.command(epilog="Example:  dmlkit gallery index galleries/birds --kind ivf_hnsw_sq --recall 0.95")
def index(
    gallery: GalleryPath,
    kind: Annotated[
        Literal["ivf_pq", "ivf_hnsw_sq"], typer.Option(help="Compact codes, or a graph, which is slower to build.")
    ] = "ivf_pq",
    recall: Annotated[float, typer.Option(help="Share of the 10 nearest that a search must find.")] = 0.99,
    debug: Debug = False,
) -> None:
    """Make search and identify faster: build an approximate index, and measure what it finds."""
    from rich.console import Console

    from dmlkit.cli.console import say
    from dmlkit.embedding.gallery.index import index_gallery
    from dmlkit.embedding.search import MARGIN

    found, console = index_gallery(gallery, kind, recall), Console()
    how = f"{found.index.nprobes} parts, and at {found.index.candidates:.3g} x (k + {MARGIN}) images for the k nearest"
    say(console, f"{kind}: built in {found.build_seconds:.1f} s; a search looks at {how}")
    asked = f"{found.queries} images of the gallery, each without itself"
    say(console, f"recall {found.index.recall:.4f} of the 10 nearest, on {asked}")
    say(console, f"{found.milliseconds:.3f} ms a query; exact {found.exact_milliseconds:.3f} ms")
