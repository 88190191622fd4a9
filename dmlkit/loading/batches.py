"""Batches of a dataset; the augmentation of a sample depends only on its position in training."""

import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from multiprocessing.queues import Queue
from threading import Thread
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import WORKER_START, Turns, take_turns
from dmlkit.distributed.device_name import count_cores
from dmlkit.distributed.launch import count_ranks, release_freed_memory
from dmlkit.errors import UserError, some_of
from dmlkit.loading.inputs import Batch, Draw, Inputs, Item, inputs_of
from dmlkit.samplers.base import Sampler
from dmlkit.transforms.base import TransformConfig

SAMPLER_REMEDY = "correct it by dmlkit.testing.check_sampler"


class TrainingBatches:
    """Iterable of the draws of one rank, batch by batch. Set ``epoch`` and ``start`` before each pass.

    Each of the ranks has an equal contiguous share of every batch.
    """

    def __init__(self, sampler: Sampler, seed: int, *, rank: int = 0, ranks: int = 1) -> None:
        self.sampler, self.seed, self.ranks = sampler, seed, ranks
        share = sampler.batch_size // ranks
        self.share = slice(rank * share, (rank + 1) * share)
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return len(self.sampler) - self.start

    def __iter__(self) -> Iterator[list[Draw]]:
        batches = list(self.sampler.batches(self.epoch))
        count, size = len(self.sampler), self.sampler.batch_size
        if not count or len(batches) != count or any(len(batch) != size for batch in batches):
            # a plug-in's: images beyond the declared size would be left out
            got = f"gave {len(batches)} batches of {sorted({len(batch) for batch in batches})} images"
            raise UserError(f"{type(self.sampler).__name__}: {got}, expected {count} of [{size}]; {SAMPLER_REMEDY}")
        images = len(self.sampler.labels)
        if wrong := {index for batch in batches for index in batch if not 0 <= index < images}:
            name, few = type(self.sampler).__name__, some_of([str(index) for index in sorted(wrong)])
            raise UserError(f"{name}: gave the images {few}, expected 0 to {images - 1}; {SAMPLER_REMEDY}")
        for step, batch in enumerate(batches):
            if step >= self.start:
                seeds = np.random.default_rng([self.seed, self.epoch, step]).integers(2**62, size=len(batch))
                yield list(zip(batch[self.share], seeds[self.share].tolist(), strict=True))


def collate(items: list[Item]) -> Batch:
    """Stack the samples that could be read."""
    good = [item for item in items if item.input is not None]
    inputs = [item.input for item in items if item.input is not None]
    return Batch(
        stack(inputs) if inputs else torch.empty(0),
        torch.tensor([item.label for item in good], dtype=torch.int64),
        torch.tensor([item.row for item in good], dtype=torch.int64),
        {item.row: item.fault for item in items if item.input is None},
    )


def stack(inputs: list[Tensor]) -> Tensor:
    """Stack vectors (F,) and other samples to (B, F), images (3, H, W) to (B, 3, H, W) in channels-last format.

    Decoders return this format and convolutions need it; converting to planes and back would take a fifth of a
    loader's time.
    """
    if inputs[0].ndim != 3:
        return torch.stack(inputs)
    return torch.stack([image.permute(1, 2, 0) for image in inputs]).permute(0, 3, 1, 2)


_most_workers = [8]  # more than 8 gained nothing; a list, since functions change it


def limit_workers(cores: int) -> None:
    """Let each loader of this process use at most this many of the CPU cores: other processes train on the rest."""
    _most_workers[0] = min(8, max(1, cores))


def default_workers() -> int:
    """Return the number of processes that read images by default: one per core of a rank, see `limit_workers`."""
    return min(_most_workers[0], max(1, count_cores() // count_ranks()[1]))


class Loader(DataLoader[Any]):
    """Loader of `Batch`, whose first pass starts its readers: they stay for the next passes."""

    def __iter__(self) -> Any:  # torch's class of iterators is private
        if self.num_workers and self._iterator is None:
            release_freed_memory()
        return super().__iter__()


def make_loader(inputs: Inputs, batches: Iterable[list[Draw]], *, workers: int | None, pin_memory: bool) -> Loader:
    """Return a loader of `Batch` over batches of draws.

    Args:
        workers: number of processes that read images, at most one per batch; None is `default_workers`, and 0 for
            images in memory.
        pin_memory: whether to use pinned memory, from which copies to a GPU are asynchronous.
    """
    if workers is None:
        workers = 0 if inputs.dataset.in_memory else default_workers()
    if isinstance(batches, Sized):
        workers = min(workers, len(batches))
    collate_function: Callable[[list[Item]], Batch] = collate
    return Loader(
        inputs,
        batch_sampler=batches,  # pyright: ignore[reportArgumentType] - draws are pairs, torch's stub expects ints
        collate_fn=collate_function,
        num_workers=workers,
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
        worker_init_fn=partial(start_reader, Turns()) if workers else None,
        multiprocessing_context=WORKER_START if workers else None,
        # each pass draws a seed that no item uses; a resumed epoch would draw it twice from torch's global generator
        generator=torch.Generator(),
    )


def start_reader(turns: Turns, _: int) -> None:
    """Let this reader decode within a bound that it shares with the others; let only its parent end it by SIGTERM.

    A scheduler that stops a job signals every process of it, and training still needs images up to its checkpoint.
    The reader sends its parent the errors of sending a batch. It leaves the garbage of its parent alone: a decoder of
    videos in it would wait without end for its threads, which are not forked.
    """
    gc.freeze()
    take_turns(turns)
    setattr(Queue, "_on_queue_feeder_error", _send_error)  # noqa: B010 - a private hook, which stubs do not have
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _send_error(queue: "Queue[Any]", error: Exception, sent: tuple[int, object]) -> None:
    """Send an error in place of a batch, which Python would drop: the parent would wait for it without end."""
    queue.put((sent[0], ExceptionWrapper((type(error), error, error.__traceback__), where="in a reader")))


def _end_with_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class TimedBatches:
    """Iterable of a loader's batches that measures the time spent waiting."""

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader = loader
        self.seconds = 0.0  # of this pass, including the start of worker processes

    def __iter__(self) -> Iterator[Batch]:
        self.seconds, started = 0.0, perf_counter()
        for batch in self.loader:
            self.seconds += perf_counter() - started
            yield batch
            started = perf_counter()


def evaluation_loader(
    dataset: Dataset,
    transform: TransformConfig | None,
    *,
    indices: Iterable[int] | None = None,
    batch_size: int = 128,
    workers: int | None = None,
    pin_memory: bool = False,
) -> Loader:
    """Return a loader of `Batch` for evaluation, over all samples of a dataset in order or over ``indices``."""
    order = [(index, 0) for index in (range(len(dataset)) if indices is None else indices)]
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    inputs = inputs_of(dataset, transform, training=False)
    return make_loader(inputs, batches, workers=workers, pin_memory=pin_memory)
