"""Embedding of images with a run's model into files: ``dmlkit embed``."""

import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.boxes import Boxes
from dmlkit.distributed.launch import count_ranks, start_ranks
from dmlkit.errors import UserError, merged, warn_once
from dmlkit.files.outputs import check_place
from dmlkit.recipe.plugin import refuse_plugin_files
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import threshold_of
from dmlkit.vectors.features import software_of
from dmlkit.vectors.images import dataset_of
from dmlkit.vectors.job import Compute, EmbedJob, PartEmbedder, embed_job
from dmlkit.vectors.manifest import Manifest, SplitRecord
from dmlkit.vectors.progress_bar import EMBEDDING, Advance, Bar, no_bar
from dmlkit.vectors.stored import StoredSplit, known_points, sole_embedding, split_job, stamps_of
from dmlkit.vectors.trained import TrainedModel, load_model, shortened

Engine = Literal["local", "torchrun", "ray"]
MAX_READERS = 8  # processes per GPU of a Ray worker that read images


@dataclass(frozen=True)
class EmbedOptions:
    """How a run embeds images or a split of its dataset."""

    labels: str | None = None
    """Labels of images, see `images_at`."""
    boxes: Boxes | None = None
    """Boxes of images, see `images_at`."""
    overrides: Sequence[str] = ()
    """Changes of the dataset of a split, which may have moved, each ``key=value``."""
    checkpoint: CheckpointName | None = None
    """Checkpoint to use. Default: best, otherwise last."""
    dims: int | None = None
    """Number of first coordinates of the embeddings, see `shortened`. Default: all."""
    skip_bad_images: bool = False
    """Leave out images that cannot be read, and list them."""
    engine: Engine | None = None
    """See `choose_engine`."""

    def check(self, images: Path | None, split: Split | None) -> None:
        """Raise a `UserError` unless there are images or a split, and only options that apply to them."""
        if (images is None) == (split is None):
            raise UserError("embed: expected either IMAGES or --split, e.g. dmlkit embed runs/demo --split test")
        if images is not None and self.overrides:
            raise UserError(f"embed: --set {self.overrides[0]} applies only to --split, not to {images}; remove it")
        for option, given in ((f"--labels {self.labels}", self.labels), ("--boxes", self.boxes)):
            if split is not None and given is not None:
                raise UserError(
                    f"embed: {option} applies only to IMAGES, because a split has those of its dataset; remove it"
                )


DEFAULTS = EmbedOptions()


def embed(
    run: Path,
    images: Path | None = None,
    *,
    split: Split | None = None,
    output: Path | None = None,
    device: str = "auto",
    options: EmbedOptions = DEFAULTS,
    bar: Bar = no_bar,
    say: Callable[[str], None] = lambda _: None,
) -> Manifest | None:
    """Embed images, or a split of the run's own dataset, into files that other programs read.

    A run that takes vectors embeds a file of vectors instead of images.

    Args:
        run: the run.
        images: image, folder or table of images, or file of vectors; either this or ``split`` is given.
        split: split of the run's dataset.
        output: folder for ``embeddings.npy``, ``items.parquet`` and ``manifest.json``; by default
            ``RUN/embeddings/`` and the name of the images, with ``-N`` for the first N coordinates. A split in that
            folder is embedded only if it is not yet, see `split_embeddings`.
        device: device, see `start_ranks`.
        options: how they are embedded.
        bar: shows each step.
        say: called with a message about images that were embedded already.

    Returns:
        The manifest, on the first rank; None on others.

    Raises:
        UserError: see `embed_job` and `EmbedOptions.check`.
    """
    options.check(images, split)
    engine, dims = choose_engine(options.engine), options.dims
    fabric = start_ranks("cpu" if engine == "ray" else device)  # Ray's workers, not this process, need the device
    folder = RunFolder(run)
    trained = load_model(folder, fabric, options.checkpoint, overrides=options.overrides)
    trained = trained if dims is None else _short(trained, dims, engine)
    if output is not None:
        check_place(output, [images, trained.recipe.dataset.data_root])
    skip = options.skip_bad_images or trained.recipe.dataset.on_bad_image == "skip"
    boxes = options.boxes and options.boxes._replace(skips=skip)
    dataset = dataset_of(images, split or "test", trained.recipe, options.labels, boxes)
    for line in merged(dataset.left_out):
        warn_once(line)
    place = output or output_of(folder, images, split, trained.checkpoint, dims)
    threshold = threshold_of(folder, trained.fingerprint)
    if split is None:
        known = known_points(trained, dataset, fabric) if fabric.is_global_zero else None
        job = EmbedJob(dataset, str(images), place, skip_bad_images=skip, threshold=threshold, run=run)
        record = SplitRecord(software=software_of(trained.recipe), checkpoint=trained.saved)
        job = replace(job, known=fabric.broadcast(known), split=record, stamps=stamps_of(dataset))
    else:
        job = split_job(folder, trained, dataset, split, device="" if engine == "ray" else trained.place)
        job = replace(job, output=place, skip_bad_images=skip, threshold=threshold)
    if engine == "ray":
        compute = ray_compute(job, run, trained.checkpoint, device)
    else:
        compute = PartEmbedder(job, trained, fabric, workers=trained.recipe.training.workers)
    is_first = fabric.is_global_zero
    say = say if is_first else lambda _: None
    stored = StoredSplit(job, trained) if is_first and split is not None and output is None else None
    with sole_embedding(None if stored is None else job):
        manifest = None if stored is None else stored.finished()
        if fabric.broadcast(manifest is not None):
            say("these images are embedded already")
            return manifest
        with bar(EMBEDDING, len(dataset)) as advance:
            return embed_job(job, trained, fabric, compute, advance=advance, say=say)


def choose_engine(engine: Engine | None) -> Engine:
    """Return the requested engine; by default torchrun's ranks if there are several, otherwise this process.

    Raises:
        UserError: the program was not started as the engine needs it.
    """
    ranks = count_ranks()[0]
    if engine is None:
        return "torchrun" if ranks > 1 else "local"
    if engine == "torchrun" and "WORLD_SIZE" not in os.environ:
        raise UserError(
            "--engine torchrun: torchrun did not start this process; use torchrun --nproc-per-node=N -m dmlkit embed "
            "..., where N is the number of GPUs"
        )
    if engine != "torchrun" and ranks > 1:
        raise UserError(
            f"--engine {engine}: torchrun has started {ranks} processes; remove --engine, or use dmlkit embed without "
            "torchrun"
        )
    return engine


def _short(trained: TrainedModel, dims: int, engine: Engine) -> TrainedModel:
    """Return the model of the first coordinates; other processes and engines load the whole one."""
    if engine == "ray" or trained.computation is not None:
        raise UserError(
            f"embed: --dims {dims} applies to torch in this process or under torchrun; leave out --engine ray and "
            "any runtime in --device"
        )
    return shortened(trained, dims)


def output_of(
    run: RunFolder, images: Path | None, split: Split | None, checkpoint: CheckpointName, dims: int | None = None
) -> Path:
    """Return the folder of a run into which images, or a split, are embedded by default; another if shortened."""
    place = run.embeddings_of(str(split), checkpoint) if images is None else run.embeddings_of_images(images)
    return place if dims is None else place.with_name(f"{place.name}-{dims}")


def ray_compute(job: EmbedJob, run: Path, checkpoint: CheckpointName, device: str) -> Compute:
    """Return a function that computes parts on Ray: on the cluster of ``RAY_ADDRESS``, of this machine, or a new one.

    A worker takes a GPU and its share of the processors, which read images; without a GPU one processor. Each loads
    the model once.

    Args:
        job: images to embed, and the output; its dataset is sent to the workers.
        run: run folder, which all workers can reach, like the images and the output.
        checkpoint: name of the checkpoint.
        device: ``auto`` (GPUs where the cluster has some), ``cpu`` or ``cuda``.

    Raises:
        UserError: Ray is not installed, or it cannot give such a device.
    """
    try:
        ray: Any = import_module("ray")
        import_module("ray.data")
    except ImportError:
        raise UserError("--engine ray: Ray is not installed; install it with: pip install 'dmlkit[ray]'") from None
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device}: expected auto, cpu or cuda, because Ray assigns devices to workers")
    refuse_plugin_files()

    def compute(numbers: list[int], advance: Advance) -> None:
        if not numbers:
            return
        with _ray_cluster() as is_new:
            if is_new:  # its errors reach the user as exceptions
                ray.data.DataContext.get_current().enable_progress_bars = False
                logging.getLogger("ray.data").setLevel(logging.CRITICAL)
            gpus, processors = _worker_share(device)
            arguments = (ray.put(job), run, checkpoint, "cuda" if gpus else "cpu", processors, Path.cwd())
            items = ray.data.from_items([{"part": part} for part in numbers], override_num_blocks=len(numbers))
            done = items.map_batches(
                RayWorker,
                fn_constructor_args=arguments,
                batch_size=1,
                num_gpus=gpus,
                num_cpus=processors,
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=len(numbers)),
            )
            for row in done.iter_rows():
                if row["fault"]:
                    raise UserError(row["fault"])
                advance(len(job.parts.images(row["part"])))

    return compute


@contextmanager
def _ray_cluster() -> Generator[bool]:
    """Connect to Ray, unless the program is connected, with few messages from Ray itself; yield whether it is new."""
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        yield False
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports from our clusters
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else it warns about how Ray Data starts workers
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield True
    except RayError as error:
        words = str(error).strip().splitlines()[-1]
        raise UserError(
            f"--engine ray: a worker failed: {words}; every machine needs the same version of dmlkit and its "
            "dependencies; finished parts are kept, and the same command resumes (--debug shows Ray's error)"
        ) from error
    finally:
        ray.shutdown()


def _worker_share(device: str) -> tuple[int, int]:
    """Return the numbers of GPUs and processors per worker, such that every machine can use all its GPUs.

    Without GPUs a worker has one processor.
    """
    import ray

    machines: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    due = [machine.get("CPU", 0) // machine["GPU"] for machine in machines if machine.get("GPU")]
    if device == "cpu" or (device == "auto" and not due):
        return 0, 1
    if not due:
        raise UserError("--device cuda: no machine of this Ray cluster has a GPU; use --device cpu")
    return 1, int(min(MAX_READERS, max(1, min(due))))


class RayWorker:
    """Worker of Ray: it loads the model once; called with the number of a part, it computes and writes that part.

    Args:
        job: Ray's reference to the job.
        processors: its share of the processors.
        folder: working directory of the command, to which relative paths refer.
    """

    def __init__(
        self, job: Any, run: Path, checkpoint: CheckpointName, device: str, processors: int, folder: Path
    ) -> None:
        import ray

        self.fault = ""
        try:
            os.chdir(folder)
            self.job: EmbedJob = ray.get(job)
            fabric = start_ranks(device)
            trained = load_model(RunFolder(run), fabric, checkpoint)
            self.job.parts.check(self.job.describe(trained))
            self.embed = PartEmbedder(self.job, trained, fabric, workers=processors if device == "cuda" else 0)
        except (UserError, OSError) as error:  # reported by the first call: Ray would retry forever
            self.fault = f"a Ray worker cannot start: {error}"

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compute a part; a user error is returned as text, since Ray would wrap an exception in its own."""
        number = int(batch["part"][0])
        if not self.fault:
            try:
                self.embed([number], lambda _: None)
            except (UserError, OSError) as error:
                self.fault = str(error)
        return {"part": [number], "fault": [self.fault]}
