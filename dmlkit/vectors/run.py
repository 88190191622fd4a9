"""Embedding of images with a run's model into files: ``dmlkit embed``."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import count
from math import inf
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.lib import format as npy

from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.boxes import Boxes
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.table import TableConfig, other_table
from dmlkit.distributed.launch import Ranks, count_ranks, start_ranks
from dmlkit.errors import UserError, merged, warn_once
from dmlkit.files.arrays import Values
from dmlkit.files.atomic import atomic_write
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import BOX, EMBEDDING_MARKS, check_folder, check_place, check_writable, writing
from dmlkit.files.paths import readable_name
from dmlkit.files.readers.base import reader_of
from dmlkit.files.regular import file_checksum
from dmlkit.files.source import place_of_run
from dmlkit.loading.inputs import refuse_missing, refuse_nothing_read
from dmlkit.recipe.plugin import plugin_files
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import threshold_of
from dmlkit.vectors.fill import Filled, FillJob, PartEmbedder, fill
from dmlkit.vectors.images import dataset_of
from dmlkit.vectors.manifest import Checksums, ListingTable, Manifest
from dmlkit.vectors.progress_bar import Advance, Bar, no_bar
from dmlkit.vectors.store import PART_IMAGES, image_keys, stored_model
from dmlkit.vectors.trained import TrainedModel, describe, load_model, shortened

MAX_READERS = 8  # processes per GPU of a Ray worker that read images
REPAIR = "repair or remove it, or skip such images with --skip-bad-images, and rerun the same command to resume"


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
    ray: bool = False
    """Let the workers of a Ray cluster embed, instead of this process or the ranks of torchrun."""

    def check(self, images: Path | None, split: Split | None) -> None:
        """Raise a `UserError` unless there are images or a split, and only options that apply to them."""
        if (images is None) == (split is None):
            raise UserError("embed: expected either IMAGES or --split, e.g. dmlkit embed runs/demo --split test")
        if self.ray and count_ranks()[0] > 1:
            raise UserError("--ray: torchrun has started this process; remove --ray, or do without torchrun")
        if images is not None and self.overrides:
            raise UserError(f"embed: --set {self.overrides[0]} applies only to --split, not to {images}; remove it")
        option = f"--labels {self.labels}" if self.labels is not None else self.boxes.option if self.boxes else ""
        if split is not None and option:
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
        images: image, folder or table of images, or file of vectors; either this or ``split`` is given.
        output: folder for ``embeddings.npy``, ``items.parquet`` and ``manifest.json``; by default
            ``RUN/embeddings/`` and the name of the images, with ``-N`` for the first N coordinates. A split in that
            folder is embedded only if it is not yet, see `split_embeddings`.

    Returns:
        The manifest, on the first rank; None on others.

    Raises:
        UserError: an image cannot be read, the disk is full, the folder has other files, or see `EmbedOptions.check`.
    """
    options.check(images, split)
    dims = options.dims
    ranks = start_ranks("cpu" if options.ray else device)  # Ray's workers, not this process, need the device
    folder = RunFolder(run)
    if options.checkpoint is None and ranks.is_global_zero:
        folder.warn_of_loss()
    trained = load_model(folder, ranks, options.checkpoint, overrides=options.overrides)
    if dims is not None and (options.ray or trained.computation is not None):  # they load the whole model
        raise UserError(f"embed: --dims {dims} applies to torch alone; leave out --ray and any runtime in --device")
    trained = trained if dims is None else shortened(trained, dims)
    source = str(images) if split is None else f"{trained.recipe.dataset.name}:{split}"
    recorded = source if images is None else str(images.resolve())  # the same from any current folder
    recorded = recorded if readable_name(recorded) else source
    place = output or output_of(folder, images, split, trained.checkpoint, dims)
    check_folder(place, "embeddings", *EMBEDDING_MARKS, sources=[])
    check_place(place, [images, trained.recipe.dataset.data_root])
    if (place / "manifest.json").exists():
        check_earlier(Manifest.read(place / "manifest.json"), folder, recorded, None if output else place)
    skip = options.skip_bad_images or trained.recipe.dataset.on_bad_image == "skip"
    boxes = options.boxes
    if skip and images is not None and trained.samples.has_pixels:
        boxes = (boxes or Boxes())._replace(skips=True)
    dataset = dataset_of(images, split or "test", trained.recipe, options.labels, boxes)
    for line in merged(dataset.left_out):
        warn_once(line)
    way = "name their folder with --root, or skip such images with --skip-bad-images"
    refuse_missing(dataset, "skip" if skip else "error", source, way)
    vectors_folder = ranks.broadcast(_home(folder, place) if ranks.is_global_zero else place)
    lock, are_inside = sole_writer(place, what="dmlkit embed", patience=inf), vectors_folder.is_relative_to(place)
    # points in the output go with this command: another one for the same output waits before it reads them
    with lock if are_inside and ranks.is_global_zero else nullcontext():
        with RayWorkers.started(device) if options.ray else nullcontext() as workers:
            model = stored_model(trained, workers.device if workers else "")
            keys = image_keys(dataset, trained.recipe.dataset)
            job = FillJob(
                dataset, keys, vectors_folder, model, exact=split is not None, needs_all="" if skip else REPAIR
            )
            load = partial(load_model, folder, checkpoint=trained.checkpoint, overrides=options.overrides)
            compute = None if workers is None else partial(workers.compute, load)
            filled = fill(job, trained, ranks, bar=bar, compute=compute)
        ranks.barrier()  # each rank waits until it has seen all points, which the first one may remove below
        if not ranks.is_global_zero:
            return None
        if filled.known:
            subject = f"{filled.known} of {len(dataset)} images were"
            say(f"{'these images are' if filled.known == len(dataset) else subject} embedded already")
        refuse_nothing_read(len(dataset) - len(filled.faults), filled.faults, source)
        with nullcontext() if are_inside else lock, writing(place / "manifest.json"):
            table = _listing_table(images, recorded, options.boxes or Boxes(), trained.recipe.dataset)
            manifest = write_embeddings(folder, trained, dataset, recorded, place, filled, table)
        if are_inside:
            shutil.rmtree(vectors_folder, ignore_errors=True)
    return manifest


def check_earlier(earlier: Manifest, run: RunFolder, source: str, place: Path | None) -> None:
    """Raise a `UserError` if a folder that the user has not named has embeddings of other images.

    That of a pretrained model is in the current folder, where another model may have written.
    """
    is_other_model = run.model is not None and earlier.run not in (None, run.model)
    is_other = Path(earlier.source).resolve() != Path(source).resolve()  # older manifests may have relative paths
    if place is not None and (is_other or is_other_model):
        by = f" by {earlier.run}" if is_other_model else ""
        raise UserError(
            f"{place}: has embeddings of {earlier.source}{by}; choose another folder with --output, or remove it"
        )


def _home(run: RunFolder, output: Path) -> Path:
    """Return the folder of a run for its points; if it cannot be written, one in the output, for this command."""
    try:
        check_writable(run.vectors)
    except UserError:
        return output / "vectors"
    return run.vectors


def _listing_table(images: Path | None, source: str, boxes: Boxes, dataset: DatasetConfig) -> ListingTable | None:
    """Return the table that lists the images of a source, or of the dataset of a split; None if no table does."""
    if images is None and isinstance(dataset, TableConfig):
        return ListingTable(file=dataset.file, root=dataset.root, columns=dataset.columns)
    if images is None or reader_of(images) is None:
        return None
    root = None if boxes.root is None else str(boxes.root.resolve())
    known = other_table(images, dataset if isinstance(dataset, TableConfig) else None).columns
    return ListingTable(file=source, root=root, columns={**known, **boxes.columns})


def write_embeddings(
    run: RunFolder,
    trained: TrainedModel,
    dataset: Dataset,
    source: str,
    output: Path,
    filled: Filled,
    table: ListingTable | None,
) -> Manifest:
    """Write ``embeddings.npy``, ``items.parquet`` and, last, ``manifest.json``, one part in memory at a time.

    No file is there before all are complete: a folder without a manifest is refused, also by the command that resumes.
    """
    path, description, run_path = output / "manifest.json", describe(trained), str(place_of_run(run.path))
    store, rows, faults, _ = filled
    indices, checksum = np.flatnonzero(rows >= 0), 0
    parts = [indices[start : start + PART_IMAGES] for start in range(0, len(indices), PART_IMAGES)]
    with (
        atomic_write(path) as described,
        atomic_write(output / "items.parquet") as items,
        atomic_write(output / "embeddings.npy") as points,
    ):
        with points.open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (len(indices), description.dim)}
            npy.write_array_header_1_0(file, header)
            for part in parts:
                content = np.ascontiguousarray(store.points_at(rows[part]).numpy(), dtype="<f4").tobytes()
                checksum = crc32(content, checksum)
                file.write(content)
                store.release()
        _write_items(items, dataset, parts)
        limits = {"query": dataset.query, "gallery": dataset.gallery, "group": dataset.groups}
        manifest = Manifest(
            **dict(description),
            source=source,
            count=len(indices),
            skipped=tuple(faults),
            threshold=threshold_of(run, trained.fingerprint),
            run=run_path if readable_name(run_path) else None,
            checksums=Checksums(points=checksum, items=file_checksum(items)),
            table=table,
            limits=tuple(name for name, values in limits.items() if values is not None),
        )
        described.write_text(manifest.text(), encoding="utf-8")
        path.unlink(missing_ok=True)  # a kill leaves no manifest of other embeddings
    return manifest


def _write_items(path: Path, dataset: Dataset, parts: Sequence[Values]) -> None:
    import pyarrow as pa
    from pyarrow.json import ParseOptions, read_json
    from pyarrow.parquet import ParquetWriter

    columns: list[tuple[str, Any]] = [("id", pa.int64()), ("path", pa.string()), ("label", pa.string())]
    columns += [(name, pa.float64()) for name in BOX] if dataset.boxes is not None else []
    schema, numbers = pa.schema(columns), count()
    with ParquetWriter(path, schema) as writer:
        for part in parts:
            lines, labels = list[str](), dataset.label_names(dataset.labels[torch.from_numpy(part)])
            for index, label in zip(part.tolist(), labels, strict=True):
                item = {"id": next(numbers), "path": dataset.paths[index], "label": label}
                lines.append(json.dumps(item | dict(zip(BOX, dataset.box(index) or (), strict=False))))
            # as JSON, 0.05 s, since `pyarrow.array` imports pandas where it is installed, 0.3 s
            content, options = pa.BufferReader("\n".join(lines).encode()), ParseOptions(explicit_schema=schema)
            writer.write_table(read_json(content, parse_options=options))


def output_of(
    run: RunFolder, images: Path | None, split: Split | None, checkpoint: CheckpointName, dims: int | None
) -> Path:
    """Return the folder of a run into which images, or a split, are embedded by default; another if shortened."""
    place = run.embeddings_of(images or str(split), checkpoint)
    return place if dims is None else place.with_name(f"{place.name}-{dims}")


class RayWorkers:
    """Workers of Ray: on the cluster of ``RAY_ADDRESS``, of this machine, or a new one.

    A worker takes a GPU and its share of the processors, which read images; without a GPU one processor. Each loads
    the model once.
    """

    def __init__(self, device: str) -> None:
        import ray

        machines: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        shares = [machine.get("CPU", 0) // machine["GPU"] for machine in machines if machine.get("GPU")]
        if device == "cuda" and not shares:
            raise UserError("--device cuda: no machine of this Ray cluster has a GPU; use --device cpu")
        self.gpus = int(device != "cpu" and bool(shares))
        self.device = "cuda" if self.gpus else "cpu"
        # such that every machine can use all its GPUs
        self.processors = int(min(MAX_READERS, max(1, min(shares)))) if self.gpus else 1

    @classmethod
    @contextmanager
    def started(cls, device: str) -> "Generator[RayWorkers]":
        """Connect to Ray within the block, unless the program is connected, with few messages from Ray itself."""
        try:
            ray: Any = import_module("ray")
            import_module("ray.data")
        except ImportError:
            raise UserError("--ray: Ray is not installed; install it with: pip install 'dmlkit[ray]'") from None
        if device not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device {device}: expected auto, cpu or cuda, because Ray assigns devices to workers")
        for path in plugin_files():
            raise UserError(
                f"--plugin {path}: Ray workers load only installed plug-ins; make it a package, see docs/plugins.md"
            )
        if ray.is_initialized():
            yield cls(device)
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports from our clusters
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else it warns about how Ray Data starts workers
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False  # its errors reach the user as exceptions
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        try:
            yield cls(device)
        except ray.exceptions.RayError as error:
            words = str(error).strip().splitlines()[-1]
            raise UserError(
                f"--ray: a worker failed: {words}; every machine needs the same version of dmlkit and its "
                "dependencies; finished parts are kept, and the same command resumes (--debug shows Ray's error)"
            ) from error
        finally:
            ray.shutdown()

    def compute(
        self, load: Callable[[Ranks], TrainedModel], job: FillJob, numbers: list[int], advance: Advance
    ) -> None:
        """See `Compute`; the images, which all workers can reach, are sent by their paths."""
        import ray

        arguments = (ray.put(job), load, self.device, self.processors, Path.cwd())
        items: Any = ray.data.from_items([{"part": part} for part in numbers], override_num_blocks=len(numbers))
        results = items.map_batches(
            RayWorker,
            fn_constructor_args=arguments,
            batch_size=1,
            num_gpus=self.gpus,
            num_cpus=self.processors,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=len(numbers)),
        )
        for row in results.iter_rows():
            if row["fault"]:
                raise UserError(row["fault"])
            advance(len(job.rows(row["part"])))


class RayWorker:
    """Worker of Ray: it loads the model once; called with the number of a part, it computes and writes that part.

    Args:
        folder: working directory of the command, to which relative paths refer.
    """

    def __init__(
        self, job: Any, load: Callable[[Ranks], TrainedModel], device: str, processors: int, folder: Path
    ) -> None:
        import ray

        self.fault = ""
        try:
            os.chdir(folder)
            sent: FillJob = ray.get(job)
            ranks = start_ranks(device)
            trained = load(ranks)
            job = replace(sent, model=stored_model(trained))  # of another version of a package it is another folder
            job.check_reachable()
            self.embed = PartEmbedder(job, trained, ranks, workers=processors if device == "cuda" else 0)
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
