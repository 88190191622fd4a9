"""A job of embedding images: its parts as one process computes them, and the folder that they are put together into."""

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import sleep
from typing import Any, ClassVar
from zlib import crc32

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from dmlkit import __version__
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.table_file import BOX
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, killed_reader
from dmlkit.files.atomic import atomic_write
from dmlkit.files.regular import file_checksum
from dmlkit.loading.batches import make_loader
from dmlkit.loading.inputs import Draw, Inputs, inputs_of, refuse_nothing_read
from dmlkit.manifolds.base import check_points
from dmlkit.recipe.plugin import plugins_of
from dmlkit.run_folder.threshold import Threshold
from dmlkit.vectors.in_memory import UNSOUND, Embeddings, Known, fused
from dmlkit.vectors.local_features import batch_features
from dmlkit.vectors.manifest import Checksums, Description, Manifest, RunPlace, SplitRecord
from dmlkit.vectors.parts import Part, PartFolder
from dmlkit.vectors.progress_bar import Advance
from dmlkit.vectors.trained import TrainedModel, describe

Compute = Callable[[list[int], Advance], None]
"""Compute parts, given by their numbers, and report how many more images are done."""


@dataclass(frozen=True)
class EmbedJob:
    """Images to embed, and the output.

    Args:
        source: name of the images, for the manifest.
        output: folder that all processes can reach, without embeddings yet.
        skip_bad_images: leave out images that cannot be read, instead of stopping.
        threshold: threshold of the model, for the manifest; the parts do not depend on it.
        split: what embeddings that are kept in a run depend on besides the model; for the manifest too.
        run: run of the model, for the manifest.
        known: points that need not be computed.
        stamps: size and modification time of the file of each image that is kept in a run; None for other samples.
    """

    dataset: Dataset
    source: str
    output: Path
    skip_bad_images: bool
    threshold: Threshold | None = None
    split: SplitRecord | None = None
    run: Path | None = None
    known: Known | None = None
    stamps: Sequence[tuple[int, int] | None] = ()
    again: ClassVar[str] = "rerun the same command"
    way_on: ClassVar[str] = (
        "repair or remove it, or skip such images with --skip-bad-images, and rerun the same command to resume"
    )

    def inputs(self, trained: TrainedModel) -> Inputs:
        """Return the samples as a model takes them."""
        self.dataset.limit(trained.recipe.dataset.max_pixels)
        return inputs_of(self.dataset, trained.recipe.transform, training=False)

    @property
    def parts(self) -> PartFolder:
        """Folder of the parts."""
        return PartFolder(self.output, len(self.dataset))

    def describe(self, trained: TrainedModel) -> dict[str, Any]:
        """Return what the parts depend on, as plain data."""
        count, names = len(self.dataset), hash_names(self.dataset)
        found: dict[str, Any] = {"dmlkit": __version__, **describe(trained).plain(), "source": self.source}
        found["list"] = {"count": count, "hash": names, "images_per_part": self.parts.part_images}
        if plugins := plugins_of(trained.recipe):
            found["plugins"] = [record.model_dump() for record in plugins]
        if trained.local:
            found["local"] = trained.local.model_dump(mode="json")
        return found


def hash_names(dataset: Dataset) -> str:
    """Return a hash of the names of all images, in their order."""
    digest = hashlib.sha256()
    for index in range(len(dataset)):
        digest.update(dataset.key(index).encode() + b"\0")
    return digest.hexdigest()


class PartEmbedder:
    """Computation of parts with one model in one process; images of the next part are read during the current one.

    Args:
        workers: number of processes that read images; see `dmlkit.loading.batches.make_loader`.
    """

    def __init__(self, job: EmbedJob, trained: TrainedModel, fabric: Ranks, *, workers: int | None) -> None:
        self.job, self.parts, self.trained, self.device = job, job.parts, trained, fabric.device
        self.kept: list[Tensor] = []  # local features of the batches of a part
        self.known = job.known or Known(torch.empty(0, dtype=torch.int64), torch.empty(0, trained.manifold.point_dim))
        self.batches = PartBatches(self.parts, {*self.known.rows.tolist()})
        self.loaders: list[tuple[TrainedModel, Any]] = []
        for model in trained.members or (trained,):
            loader: Any = ()
            if len(self.known.rows) < len(job.dataset):
                model.model.check_takes(job.dataset)
                inputs = job.inputs(model)
                loader = make_loader(inputs, self.batches, workers=workers, pin_memory=self.device.type == "cuda")
            self.loaders.append((model, loader))

    def __call__(self, numbers: list[int], advance: Advance) -> None:
        """See `Compute`."""
        try:
            self._compute(numbers, advance)
        except RuntimeError as error:
            if killed := killed_reader(error):
                raise UserError(f"{killed}; finished parts are kept: {self.job.again} to resume") from error
            raise

    def _compute(self, numbers: list[int], advance: Advance) -> None:
        self.batches.numbers = numbers
        batches = [(model, iter(loader)) for model, loader in self.loaders]
        local = self.trained.local
        with batch_features(local, self.trained, self.job.dataset) if local else nullcontext() as features:
            for number in numbers:
                known, count = self.known.within(self.parts.images(number)), len(self.batches.of(number))
                if len(known.rows):
                    advance(len(known.rows))
                self.kept = [torch.empty(0, *local.shape, dtype=torch.float16)] if local else []
                found = [self._part(model, islice(given, count), advance, features) for model, given in batches]
                part = found[0] if len(found) == 1 else fused(self.trained, found)
                rows, points = known.joined(part.indices, part.points)
                kept = torch.cat(self.kept) if local else None
                self.parts.write(number, Part(points, rows, part.faults, self.trained.place, kept))

    @torch.inference_mode()
    def _part(
        self,
        trained: TrainedModel,
        batches: Iterator[Any],
        advance: Advance,
        features: Callable[[Tensor], Tensor] | None,
    ) -> Embeddings:
        """Embed the images of a part that are not known with one model, and keep their local features."""
        points = [torch.empty(0, trained.manifold.point_dim)]
        labels = [torch.empty(0, dtype=torch.int64)]
        indices = [torch.empty(0, dtype=torch.int64)]
        faults: list[str] = []
        for batch in batches:
            if batch.faults and not self.job.skip_bad_images:
                raise UserError(f"{batch.faults[0]}; {self.job.way_on}")
            faults += batch.faults
            if len(batch.labels):
                points.append(trained.model(batch.inputs.to(self.device)).float().cpu())
                labels.append(batch.labels)
                indices.append(batch.indices)
                names = [str(self.job.dataset.paths[index]) for index in batch.indices.tolist()]
                check_points(trained.manifold, points[-1], names.__getitem__, UNSOUND)
                if features is not None:
                    self.kept.append(features(batch.indices))
            if trained is self.loaders[0][0]:
                advance(len(batch.labels) + len(batch.faults))
        return Embeddings(torch.cat(points), torch.cat(labels), torch.cat(indices), faults)


class PartBatches:
    """Batches of some parts, one after another; set ``numbers`` before each pass."""

    def __init__(self, parts: PartFolder, known: Container[int]) -> None:
        self.parts, self.known = parts, known
        self.numbers: list[int] = []

    def of(self, number: int) -> list[list[Draw]]:
        """Return the batches of a part."""
        return self.parts.batches(number, self.known)

    def __iter__(self) -> Iterator[list[Draw]]:
        for number in self.numbers:
            yield from self.of(number)


def embed_job(
    job: EmbedJob,
    trained: TrainedModel,
    fabric: Ranks,
    compute: Compute,
    *,
    advance: Advance,
    say: Callable[[str], None] = lambda _: None,
) -> Manifest | None:
    """Embed images into ``embeddings.npy``, ``items.parquet`` and ``manifest.json``, in bounded memory.

    The work is done in parts, which are kept when it is stopped: the same call resumes. Each rank computes an equal
    share of the missing parts; the first rank puts them all together.

    Args:
        compute: computes the share of a rank.
        advance: called with the number of images of every batch, on the first rank.
        say: called with a message about parts that were complete already.

    Returns:
        The manifest, on the first rank; None on others.

    Raises:
        UserError: the folder has embeddings or parts of another job, the disk is full, or an image cannot be read.
    """
    parts, skip, description = job.parts, job.skip_bad_images, job.describe(trained)
    missing: list[int] = []
    if fabric.is_global_zero:
        parts.begin(description)
        missing = parts.missing(range(len(parts)), description["dim"], skip_bad_images=skip)
    # one answer for all: a rank that looked for itself, later, would not see parts that a quick one has just written
    missing = fabric.broadcast(missing)
    parts.check(description)
    if len(missing) < len(parts):
        say(f"{len(parts) - len(missing)} of {len(parts)} parts were complete already")
    remaining = sum(len(parts.images(part)) for part in missing)
    advance(len(job.dataset) - remaining)
    share = missing[fabric.global_rank :: fabric.world_size]
    try:
        compute(share, _scaled(advance, sum(len(parts.images(part)) for part in share), remaining))
        if not fabric.is_global_zero:
            return None
        _wait(parts, missing, description["dim"], fabric, skip_bad_images=skip)
        return write_embeddings(job, describe(trained), parts.read, scratch=parts.path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and parts.is_finished():
            raise UserError(
                f"{job.output}: another dmlkit embed process has just finished this folder; use its embeddings"
            ) from None
        raise UserError(
            f"{error.filename or job.output}: {error.strerror or error}; finished parts are kept; fix the problem and "
            f"{job.again} to resume"
        ) from error
    finally:
        if fabric.is_global_zero:
            parts.leave()


def _scaled(advance: Advance, share: int, whole: int) -> Advance:
    """Report the progress of this rank as progress of all."""
    done = 0

    def report(images: int) -> None:
        nonlocal done
        advance((done + images) * whole // share - done * whole // share)
        done += images

    return report


def _wait(parts: PartFolder, missing: list[int], dim: int, fabric: Ranks, *, skip_bad_images: bool) -> None:
    """Wait until other ranks have written their parts.

    A barrier would time out after 30 minutes, and ranks of unequal speed can be further apart than that; if one of
    them dies, torchrun ends this one too."""
    while missing := parts.missing(missing, dim, skip_bad_images=skip_bad_images):
        if fabric.world_size == 1:
            raise UserError(
                f"{parts.file(missing[0])}: missing, although a worker has written it; --output must be a folder "
                "that all workers can reach under the same path"
            )
        sleep(0.5)


def write_embeddings(
    job: EmbedJob, description: Description, read: Callable[[], Iterable[Part]], *, scratch: Path
) -> Manifest:
    """Write ``embeddings.npy``, ``items.parquet`` and, last, ``manifest.json`` from all parts, one in memory at a time.

    Until the manifest exists this may be repeated, also by another process at the same time.

    Args:
        read: returns all parts in the order of the images; they are kept.
        scratch: folder on the file system of the output, for temporary files.

    Returns:
        The manifest.

    Raises:
        UserError: no image could be read.
    """
    output, faults, devices = job.output, list[str](), set[str]()
    was_read = np.zeros(len(job.dataset), dtype=bool)
    with atomic_write(output / "embeddings.npy", scratch=scratch) as partial, partial.open("wb") as file:
        count = points_checksum = 0
        _write_header(file, count, description.dim)
        for part in read():
            content = np.ascontiguousarray(part.points.numpy(), dtype="<f4").tobytes()
            points_checksum = crc32(content, points_checksum)
            file.write(content)
            faults += part.faults
            count += len(part.indices)
            was_read[part.indices.numpy()] = True
            devices.add(part.device)
        if faults and not count:
            job.parts.discard()  # the same command shall not go on with them once the images are fixed
            refuse_nothing_read(count, faults, job.source)
        _write_header(file, count, description.dim)
    _write_items(output / "items.parquet", job, read, scratch=scratch)
    split = None
    if job.split is not None:
        found = {"device": "+".join(sorted(devices)), "omitted": tuple(np.flatnonzero(~was_read).tolist())}
        split = job.split.model_copy(update=found)
    manifest = Manifest(
        **dict(description),
        source=job.source,
        count=count,
        skipped=tuple(faults),
        threshold=job.threshold,
        run=None if job.run is None else RunPlace.of(job.run, output),
        checksums=Checksums(points=points_checksum, items=file_checksum(output / "items.parquet")),
        split=split,
    )
    manifest.write(output / "manifest.json", scratch=scratch)
    return manifest


def _write_header(file: Any, count: int, dim: int) -> None:
    """Write the header of a (count, dim) float32 array at the start, of the same length for every count."""
    file.seek(0)
    npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (count, dim)})


def _write_items(path: Path, job: EmbedJob, read: Callable[[], Iterable[Part]], *, scratch: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    dataset, written = job.dataset, 0
    columns: list[tuple[str, Any]] = [("id", pa.int64()), ("path", pa.string()), ("label", pa.string())]
    columns += [(name, pa.float64()) for name in BOX] if dataset.boxes is not None else []
    columns += [("bytes", pa.int64()), ("modified", pa.int64())] if any(job.stamps) else []
    schema = pa.schema(columns)
    with (
        atomic_write(path, scratch=scratch) as partial,
        parquet.ParquetWriter(partial, schema) as writer,
    ):
        for part in read():
            indices = part.indices.tolist()
            labels = dataset.label_names(dataset.labels[part.indices])
            ids = range(written, written + len(indices))
            rows: list[Any] = [list(ids), [dataset.paths[index] for index in indices], labels]
            if dataset.boxes is not None:
                rows += [pa.array(sides, from_pandas=True) for sides in dataset.boxes[indices].T]  # NaN becomes null
            if any(job.stamps):
                stamps = [job.stamps[index] or (None, None) for index in indices]
                rows += [[size for size, _ in stamps], [modified for _, modified in stamps]]
            writer.write_table(pa.table(rows, schema=schema))
            written = ids.stop
