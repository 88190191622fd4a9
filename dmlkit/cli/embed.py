"""``dmlkit embed``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dmlkit.cli.options import Checkpoint, Debug, Device, Plugins, RunPath, SetDataset, SplitName

app = typer.Typer()


@app.command(epilog="Example:  dmlkit embed runs/demo photos/ -o embeddings/photos")
def embed(
    run: RunPath,
    images: Annotated[
        Path | None, typer.Argument(metavar="[IMAGES]", help="Folder of images, or file of vectors.")
    ] = None,
    split: Annotated[SplitName | None, typer.Option(help="Embed a split of the run's own dataset instead.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder to write; by default in the run's embeddings/.", show_default=False
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    overrides: SetDataset = None,
    skip_bad_images: Annotated[
        bool, typer.Option("--skip-bad-images", help="Leave out images that cannot be read, and list them.")
    ] = False,
    engine: Annotated[
        Literal["local", "torchrun", "ray"] | None,
        typer.Option(
            help="Who computes: this process, torchrun's ranks, or workers of a Ray cluster, which all reach RUN, the "
            "images and the output. By default torchrun's ranks where there are several, else this process.",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Embed images into embeddings.npy, items.parquet and manifest.json.

    Stopped or killed, the same command goes on where it was, also with another engine.
    """
    from functools import partial

    from rich.console import Console

    from dmlkit.cli.console import say
    from dmlkit.cli.progress import bars
    from dmlkit.distributed.launch import is_first_rank
    from dmlkit.distributed.stopping import STOPPED
    from dmlkit.embedding.run import embed as embed_images

    console = Console(quiet=not is_first_rank())
    try:
        manifest = embed_images(
            run,
            images,
            split=split,
            output=output,
            checkpoint=checkpoint,
            overrides=overrides or [],
            skip_bad_images=skip_bad_images,
            engine=engine,
            device=device,
            bar=bars(console),
            say=partial(say, console),
        )
    except KeyboardInterrupt:
        say(console, "stopped; the same command goes on with the parts that are complete")
        raise typer.Exit(STOPPED) from None
    if manifest is None:
        return
    where = output or run / "embeddings" / (images.resolve().name if images else str(split))
    say(console, f"{manifest.count} embeddings of {manifest.dim} dimensions in {where}")
    if manifest.skipped:
        say(console, f"{len(manifest.skipped)} images could not be read; manifest.json lists them")
