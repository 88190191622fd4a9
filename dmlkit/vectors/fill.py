"""Filling of a store: images are embedded in parts, by one process, by ranks or by workers of Ray."""

import hashlib
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import numpy as np
import torch

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, killed_reader
from dmlkit.files.arrays import Values
from dmlkit.files.lock import sole_writer
from dmlkit.loading.batches import make_loader
from dmlkit.loading.inputs import Batch, Draw, Inputs, inputs_of
from dmlkit.model import EmbeddingModel
from dmlkit.vectors.computation import keep_operators
from dmlkit.vectors.in_memory import Embeddings, embed_batches, features_by, fused
from dmlkit.vectors.manifest import StoredModel
from dmlkit.vectors.progress_bar import EMBEDDING, Advance, Bar
from dmlkit.vectors.store import BATCH_IMAGES, HASH, PART_IMAGES, PARTS, VectorStore, names_of, write_part
from dmlkit.vectors.trained import TrainedModel

MODEL = "model.json"
PART_BYTES = 2**26  # of a part of features, which may be larger than points
LIVE = "train without backbone.tuning.feature_views"


class UnwritableError(UserError):
    """The folder of a store cannot be written."""


@dataclass(frozen=True)
class FillJob:
    """Images of a list for a store; which ones it lacks is known once it is opened.

    Parts are cut by the length of the list alone, and at whole batches: however many processes share the work, every
    image is in the same batch and its point the same to the bit.
    """

    dataset: Dataset
    keys: Values  # their keys (N, 24)
    home: Path  # folder of stores, which all processes can reach
    model: StoredModel
    exact: bool = True  # take only points that were computed in the same batches, see `VectorStore.find`
    needs_all: str = ""  # what to do about an image that cannot be read, which stops the job. Default: leave it out
    missing: Values = field(default_factory=lambda: np.zeros(0, np.int64))  # (M,) places to embed, ascending
    augments: bool = False  # augment each image by its place, so that it is the same in every process
    dtype: torch.dtype = torch.float32  # of the stored points
    again: str = "rerun the same command"

    @property
    def path(self) -> Path:
        """Folder of the store."""
        return self.home / self.model.key

    def inputs(self, trained: TrainedModel) -> Inputs:
        """Return the samples as a model takes them."""
        self.dataset.limit(trained.recipe.dataset.max_pixels)
        return inputs_of(self.dataset, trained.recipe.transform, training=self.augments)

    @property
    def image_bytes(self) -> int:
        """Size of the point of an image."""
        return self.dtype.itemsize * self.model.description["dim"]

    @property
    def part_images(self) -> int:
        """Number of images of a part, of which some may be in the store already."""
        batches = -(-len(self.dataset) // (PARTS * BATCH_IMAGES))
        most_batches = min(PART_IMAGES, PART_BYTES // self.image_bytes) // BATCH_IMAGES
        return BATCH_IMAGES * max(1, min(batches, most_batches))

    def numbers(self) -> list[int]:
        """Return the parts that lack images."""
        return np.unique(self.missing // self.part_images).tolist()

    def rows(self, number: int) -> Values:
        """Return the images to embed of a part."""
        return self.missing[self.missing // self.part_images == number]

    def batches(self, number: int) -> list[list[Draw]]:
        """Return the batches in which a part is computed, without the images that the store has."""
        rows = self.rows(number)
        starts = np.flatnonzero(np.diff(rows // BATCH_IMAGES)) + 1
        seeds = {row: int(np.random.default_rng(row).integers(2**62)) if self.augments else 0 for row in rows.tolist()}
        return [[(row, seeds[row]) for row in batch.tolist()] for batch in np.split(rows, starts) if len(batch)]

    def check_reachable(self) -> None:
        """Raise a `UserError` unless this process sees the folder that the first one has created for its points."""
        StoredModel.read(self.path / MODEL)


Compute = Callable[[FillJob, list[int], Advance], None]
"""Compute parts of a job, given by their numbers, and report how many more images are done."""


class PartEmbedder:
    """Computation of parts with one model in one process; images of the next part are read during the current one.

    Args:
        workers: number of processes that read images; see `dmlkit.loading.batches.make_loader`. Default: that of the
            recipe, and 0 for few images.
    """

    def __init__(self, job: FillJob, trained: TrainedModel, ranks: Ranks, *, workers: int | None = -1) -> None:
        is_few = len(job.missing) <= BATCH_IMAGES
        if workers == -1:
            workers = 0 if is_few else trained.recipe.training.workers
        self.job, self.trained, self.ranks = job, trained, replace(ranks, world_size=1)
        self.batches = PartBatches(job)
        self.loaders: list[tuple[EmbeddingModel, Any]] = []
        for member in trained.members or (trained,):
            model = member.model_of_few if is_few else member.model
            model.check_takes(job.dataset)
            on_gpu = ranks.device.type == "cuda"
            loader = make_loader(job.inputs(member), self.batches, workers=workers, pin_memory=on_gpu)
            self.loaders.append((model, loader))

    def __call__(self, numbers: list[int], advance: Advance) -> None:
        """Compute parts, given by their numbers, and report how many more images are done."""
        try:
            self._compute(numbers, advance)
        except RuntimeError as error:
            if killed := killed_reader(error):
                raise UserError(f"{killed}; finished parts are kept: {self.job.again} to resume") from error
            raise

    def _compute(self, numbers: list[int], advance: Advance) -> None:
        job, self.batches.numbers = self.job, numbers
        local, batches = self.trained.local, [(model, iter(loader)) for model, loader in self.loaders]
        for number in numbers:
            rows, count, parts = job.rows(number), len(job.batches(number)), list[Embeddings]()
            for model, loaded in batches:
                watched = self._watched(islice(loaded, count))
                report: Advance = (lambda _: None) if parts else advance
                keep = features_by(local)
                parts.append(embed_batches(model, job.dataset, watched, len(rows), self.ranks, report, keep))
            part = parts[0] if len(parts) == 1 else fused(self.trained, parts, rows.tolist())
            points, lost = part.points.to(job.dtype), np.setdiff1d(rows, part.indices.numpy())
            if not points.isfinite().all():
                name = job.dataset.paths[int(part.indices[(~points.isfinite()).any(1)][0])]
                raise UserError(f"{name}: its features exceed {torch.finfo(job.dtype).max:,.0f}; {LIVE}")
            faults = dict(zip(names_of(job.keys[lost]), part.faults, strict=True))
            no_features = torch.empty(0, *local.shape, dtype=torch.float16) if local else None
            features = no_features if part.local is None else part.local
            write_part(job.path, job.keys[part.indices.numpy()], points, features, faults)

    def _watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches, and stop at an image that cannot be read."""
        for batch in batches:
            if batch.faults and self.job.needs_all:
                raise UserError(f"{batch.faults[0]}; {self.job.needs_all}")
            yield batch


class PartBatches:
    """Batches of some parts, one after another; set ``numbers`` before each pass."""

    def __init__(self, job: FillJob) -> None:
        self.job = job
        self.numbers: list[int] = []

    def __iter__(self) -> Iterator[list[Draw]]:
        for number in self.numbers:
            yield from self.job.batches(number)


class Filled(NamedTuple):
    """A store that has the points of a list of images."""

    store: VectorStore
    rows: Values  # (N,) of the images in the store; -1 for one that cannot be read
    faults: list[str]  # one message for each of these
    known: int  # number of images that the store had before


def fill(
    job: FillJob,
    trained: TrainedModel,
    ranks: Ranks,
    *,
    bar: Bar,
    title: str = EMBEDDING,
    compute: Compute | None = None,
    **options: Any,
) -> Filled:
    """Embed what a store lacks; each rank writes an equal share of the parts, and those of a killed one are kept.

    Another process that fills it with the same list waits, and computes nothing. An image that could not be read
    before is tried again: a disk may have failed for a moment.

    Args:
        job: the keys are those of the first rank.
    """
    store = VectorStore.at(job.path, trained, **options)
    job = _with_missing(job, store, trained, ranks)
    if len(job.missing):
        with _sole_filling(job, ranks), bar(title, len(job.dataset)) as advance:
            try:
                _compute(_with_missing(job, store, trained, ranks), trained, ranks, compute, advance)
            except OSError as error:
                kind = UserError if ranks.world_size > 1 else UnwritableError  # the others wait for its parts
                reason = f"{error.filename or job.path}: {error.strerror or error}"
                raise kind(f"{reason}; finished parts are kept; fix the problem and {job.again} to resume") from error
        if len(job.missing) > BATCH_IMAGES and ranks.world_size == 1 and trained.computation is None:
            keep_operators(trained)
    rows, faults = _wait(job, store, ranks)
    if faults and job.needs_all:
        raise UserError(f"{faults[0]}; {job.needs_all}")
    lacked = np.union1d(job.missing, np.flatnonzero(rows < 0))  # also the images that again could not be read
    return Filled(store, rows, faults, len(rows) - len(lacked))


def _with_missing(job: FillJob, store: VectorStore, trained: TrainedModel, ranks: Ranks) -> FillJob:
    """Return a job of what a store lacks now, as the first rank sees it."""
    store.open_new()
    missing = np.flatnonzero(store.find(job.keys, exact=job.exact) < 0)
    if store.faults and ranks.is_global_zero:
        inputs, names = job.inputs(trained), names_of(job.keys[missing])
        tried = zip(missing.tolist(), names, strict=True)
        is_readable = [name not in store.faults or inputs[row, 0].input is not None for row, name in tried]
        missing = missing[np.array(is_readable, bool)]
    keys, missing = ranks.broadcast((job.keys, missing))
    return replace(job, keys=keys, missing=missing)


@contextmanager
def _sole_filling(job: FillJob, ranks: Ranks) -> Generator[None]:
    """Create the folder of a store, and wait until no other process embeds the same list of images into it."""
    with ExitStack() as stack:
        error = ""
        try:
            if ranks.is_global_zero:
                place = job.path / hashlib.sha256(job.keys.tobytes()).hexdigest()[:HASH]
                stack.enter_context(sole_writer(place, what="an embedding of these images", patience=inf))
                if not (job.path / MODEL).exists():
                    job.model.write(job.path / MODEL)
        except (UserError, OSError) as unwritable:
            error = str(unwritable)
        if error := ranks.broadcast(error):
            raise UnwritableError(error)
        job.check_reachable()
        yield


def _compute(job: FillJob, trained: TrainedModel, ranks: Ranks, compute: Compute | None, advance: Advance) -> None:
    """Compute the share of this rank; its progress is reported as that of all."""
    advance(len(job.dataset) - len(job.missing))
    share = job.numbers()[ranks.global_rank :: ranks.world_size]
    if not share:
        return
    done, own_images, all_images = 0, sum(len(job.rows(part)) for part in share), len(job.missing)

    def report(images: int) -> None:
        nonlocal done
        advance((done + images) * all_images // own_images - done * all_images // own_images)
        done += images

    if compute is None:
        PartEmbedder(job, trained, ranks)(share, report)
    else:
        compute(job, share, report)


def _wait(job: FillJob, store: VectorStore, ranks: Ranks) -> tuple[Values, list[str]]:
    """Wait until this rank sees all points; return their rows, and messages on images that could not be read.

    A barrier would time out after 30 minutes, and ranks of unequal speed can be further apart than that; if one of
    them dies, torchrun ends this one too.
    """
    while True:
        store.open_new()
        rows = store.find(job.keys, exact=job.exact)
        faults = [store.faults[name] for name in names_of(job.keys[rows < 0]) if name in store.faults]
        lacking = np.count_nonzero(rows < 0) - len(faults)
        if not lacking:
            return rows, faults
        if ranks.world_size == 1:
            raise UserError(
                f"{job.path}: lacks {lacking} points, although a worker has written them; expected a folder that all "
                "workers can reach under the same path"
            )
        sleep(0.5)
