"""Embed images with a run's model: what ``dmlkit embed`` does."""

from collections.abc import Callable, Sequence
from pathlib import Path

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.engine import Engine, choose_engine, embed_job
from dmlkit.embedding.images import dataset_of
from dmlkit.embedding.in_memory import EMBEDDING, Bar, no_bar
from dmlkit.embedding.job import EmbedJob, PartEmbedder
from dmlkit.embedding.manifest import Manifest
from dmlkit.embedding.trained import load_model
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_place
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import threshold_of


def embed(
    run: Path,
    images: Path | None = None,
    *,
    split: Split | None = None,
    output: Path | None = None,
    checkpoint: CheckpointName | None = None,
    overrides: Sequence[str] = (),
    skip_bad_images: bool = False,
    engine: Engine | None = None,
    device: str = "auto",
    bar: Bar = no_bar,
    say: Callable[[str], None] = lambda _: None,
) -> Manifest | None:
    """Embed a folder of images, or a split of the run's own dataset, into files that other programs read.

    A run over vectors embeds a file of vectors instead of a folder of images.

    Args:
        run: the run.
        images: a folder of images, or a file of vectors; or
        split: a split of the run's dataset.
        output: a folder for ``embeddings.npy``, ``items.parquet`` and ``manifest.json``; by default
            ``RUN/embeddings/`` and the name of the images.
        checkpoint: which weights; by default the best, else the last.
        overrides: ``key=value`` each, of the run's dataset, which may have moved.
        skip_bad_images: leave out images that cannot be read, and list them.
        engine: who computes, see `choose_engine`.
        device: where, see `start_fabric`.
        bar: shows each step.
        say: told what was complete already.

    Returns:
        The manifest, on the first rank; None on others.

    Raises:
        UserError: see `embed_job`; or images and split are both given, or neither, or overrides with images.
    """
    if (images is None) == (split is None):
        raise UserError("give either IMAGES or --split, e.g. dmlkit embed runs/demo --split test")
    if images is not None and overrides:
        raise UserError(f"embed: --set {overrides[0]} is for --split, and does not apply to {images}; leave it out")
    engine = choose_engine(engine)
    fabric = start_fabric("cpu" if engine == "ray" else device)  # Ray's workers, not this process, need the device
    folder = RunFolder(run)
    trained = load_model(folder, fabric, checkpoint, overrides=overrides)
    if output is not None:
        check_place(output, [images, trained.recipe.dataset.data_root])
    dataset, labelled = dataset_of(images, split or "test", trained.recipe)
    job = EmbedJob(
        dataset,
        source=f"{trained.recipe.dataset.name}:{split}" if images is None else str(images),
        labelled=labelled,
        output=output or folder.embeddings / (images.resolve().name if images else str(split)),
        skip_bad_images=skip_bad_images or trained.recipe.dataset.on_bad_image == "skip",
        threshold=threshold_of(folder, trained.model.fingerprint()),
    )
    if engine == "ray":
        from dmlkit.embedding.ray import ray_compute

        compute = ray_compute(job, run, trained.checkpoint, device)
    else:
        compute = PartEmbedder(job, trained, fabric, workers=trained.recipe.training.workers)
    first = fabric.is_global_zero
    with bar(EMBEDDING, len(dataset)) as advance:
        return embed_job(job, trained, fabric, compute, advance=advance, say=say if first else (lambda _: None))
