"""``dmlkit embed``."""

from pathlib import Path
from typing import Annotated

import typer

from dmlkit.cli.console import Output, bars, counted, say
from dmlkit.cli.option_groups import BoxOptions
from dmlkit.cli.options import Checkpoint, ModelDevice, RunPath, SetDataset, SplitName, Writes, command
from dmlkit.files.outputs import EMBEDDING_MARKS, check_folder
from dmlkit.files.source import require_images


@command("dmlkit embed runs/demo photos/ -o embeddings/photos", "dmlkit embed runs/demo --split test")
def embed(
    run: RunPath,
    images: Annotated[
        Path | None, "IMAGES", "Image, folder of images, table with a column path, or file of vectors.", require_images
    ] = None,
    /,
    split: Annotated[
        SplitName | None,
        "SPLIT",
        "Embed this split of the run's dataset instead of IMAGES: train, validation, test or all.",
    ] = None,
    labels: Annotated[
        str | None,
        "RULE",
        "Label of each image: folder (its subfolder; the default), none, or a column of the table (default: label).",
    ] = None,
    *,
    boxes: BoxOptions,
    output: Annotated[
        Path | None,
        "FOLDER",
        "Folder to write. Default: a folder in RUN/embeddings.",
        Writes(check_folder, "embeddings", *EMBEDDING_MARKS),
    ] = None,
    dims: Annotated[
        int | None, "N", "Keep the first N coordinates, e.g. of a run with the loss matryoshka.", {"min": 1}
    ] = None,
    checkpoint: Checkpoint = None,
    overrides: SetDataset = None,
    skip_bad_images: Annotated[bool, "Skip images that cannot be read, and list them in manifest.json."] = False,
    ray: Annotated[
        bool,
        "Let the workers of a Ray cluster embed, which must all read the files. Default: this process, or torchrun's.",
    ] = False,
    device: ModelDevice = "auto",
) -> None:
    """Embed images, and write embeddings.npy, items.parquet and manifest.json.

    If it is interrupted, the same command resumes, also with --ray or under torchrun.
    """
    from dmlkit.distributed.launch import is_first_rank
    from dmlkit.distributed.stopping import STOPPED
    from dmlkit.run_folder.folder import RunFolder
    from dmlkit.vectors.run import EmbedOptions, output_of
    from dmlkit.vectors.run import embed as embed_images

    Output.console.quiet = not is_first_rank()
    try:
        manifest = embed_images(
            run,
            images,
            split=split,
            output=output,
            device=device,
            options=EmbedOptions(
                labels=labels,
                boxes=boxes.read(),
                overrides=overrides or (),
                checkpoint=checkpoint,
                dims=dims,
                skip_bad_images=skip_bad_images,
                ray=ray,
            ),
            bar=bars(),
            say=say,
        )
    except KeyboardInterrupt:
        say("stopped; finished parts are kept: rerun the same command to resume")
        raise typer.Exit(STOPPED) from None
    if manifest is None:
        return
    where = output or output_of(RunFolder(run), images, split, manifest.model.checkpoint, dims)
    say(f"{counted(manifest.count, 'embedding')} of {manifest.dim} dimensions in {where}")
    if manifest.skipped:
        say(f"{counted(len(manifest.skipped), 'image')} could not be read; manifest.json lists them")
