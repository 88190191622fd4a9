"""From a dataset to batches: augmentation that depends on the image's place alone, and bad images told apart."""

import os
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dmlkit.datasets.files.dataset import BadImageError, Dataset
from dmlkit.errors import UserError
from dmlkit.loading.sizes import check_resized
from dmlkit.samplers.base import Sampler
from dmlkit.transforms.base import TransformConfig
from dmlkit.transforms.cropping.windows import Cut, WindowTransform, collate_cuts, draw_cut, show_cuts

Draw = tuple[int, int]
"""The index of an image and the seed of its augmentation."""


class Item(NamedTuple):
    """An image of a batch, or what is wrong with it."""

    image: Tensor | Cut | None
    label: int
    row: int  # in the dataset
    fault: str = ""


class Batch(NamedTuple):
    """Images that could be read, and what is wrong with the others."""

    images: Tensor  # (B, 3, S, S) uint8; (B, 3, H, W) with plans
    labels: Tensor  # (B,) int64
    indices: Tensor  # (B,) int64, into the dataset
    faults: list[str]  # one message per image that could not be read
    plans: Tensor | None = None  # (B, 7) int64: how the device makes (B, 3, S, S) of the images


class TransformedImages(torch.utils.data.Dataset[Item]):
    """Images of a dataset, transformed. Augmentation is seeded per draw: neither the number of workers nor an
    interruption changes a pixel.

    Args:
        dataset: the images.
        transform: what to do with each.
        training: take the transform for training, not the one for evaluation.
        on_device: cut the augmentation's window out and leave it to `show_on_device` to show it.

    Raises:
        UserError: the images come from a cache that was written for another transform.
    """

    def __init__(
        self, dataset: Dataset, transform: TransformConfig, *, training: bool, on_device: bool = False
    ) -> None:
        if dataset.resizing not in (None, transform.resizing.text):
            raise UserError(
                f"dataset.cache: holds images resized to {dataset.resizing}, but the transform {transform.name} "
                f"resizes to {transform.resizing.text}; run dmlkit data cache again"
            )
        self.dataset, self.resizing = dataset, transform.resizing
        self.transform = transform.training() if training else transform.evaluation()
        self.augments = training and transform.augments
        # what the device shows
        self.windows = self.transform if on_device and isinstance(self.transform, WindowTransform) else None

    def __getitem__(self, draw: Draw) -> Item:
        index, seed = draw
        try:
            image, label = self.dataset[index]
            check_resized(image, self.resizing, self.dataset.paths[index])
        except BadImageError as error:
            return Item(None, 0, index, str(error))
        if not self.augments:
            return Item(self.transform(image), label, index)
        with seeded(seed):
            shown = self.transform(image) if self.windows is None else draw_cut(self.windows, image)
            return Item(shown, label, index)

    def show_on_device(self, batch: Batch, device: torch.device) -> Tensor:
        """The images (B, 3, S, S) uint8 of a batch on a device, without waiting for the copy."""
        images = batch.images.to(device, non_blocking=True)
        if batch.plans is None or self.windows is None:
            return images
        plans = batch.plans.to(device, non_blocking=True)
        return show_cuts(images, plans, self.windows.size, self.windows.interpolation)


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Torch's random numbers on the CPU follow ``seed`` in the block; afterwards they go on as before.

    Only the CPU's generator is seeded: ``torch.manual_seed`` also notes down a stack trace for each device that is
    not in use yet, which takes longer than the whole augmentation of an image.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


class TrainingBatches:
    """The draws of one rank, batch by batch. Set ``epoch`` and ``start`` before each pass.

    Args:
        sampler: gives the global batches.
        seed: of the augmentation.
        rank: takes the ``rank``-th of ``ranks`` equal contiguous shares of every batch.
        ranks: processes.
    """

    def __init__(self, sampler: Sampler, seed: int, *, rank: int = 0, ranks: int = 1) -> None:
        self.sampler, self.seed, self.ranks = sampler, seed, ranks
        share = sampler.batch_size // ranks
        self.share = slice(rank * share, (rank + 1) * share)
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return len(self.sampler) - self.start

    def __iter__(self) -> Iterator[list[Draw]]:
        for step, batch in enumerate(self.sampler.batches(self.epoch)):
            if step >= self.start:
                seeds = np.random.default_rng([self.seed, self.epoch, step]).integers(2**62, size=len(batch))
                yield list(zip(batch[self.share], seeds[self.share].tolist(), strict=True))


def collate(items: list[Item]) -> Batch:
    """Stack the images that could be read."""
    good = [item for item in items if item.image is not None]
    cuts = [item.image for item in good if isinstance(item.image, Cut)]
    squares = [item.image for item in good if isinstance(item.image, Tensor)]
    images, plans = collate_cuts(cuts) if cuts else (torch.stack(squares) if squares else torch.empty(0), None)
    return Batch(
        images,
        torch.tensor([item.label for item in good], dtype=torch.int64),
        torch.tensor([item.row for item in good], dtype=torch.int64),
        [item.fault for item in items if item.image is None],
        plans,
    )


def make_loader(
    images: TransformedImages, batches: Iterable[list[Draw]], *, workers: int | None, pin_memory: bool
) -> DataLoader[Any]:
    """A loader of `Batch` over batches of draws.

    Args:
        images: where they come from.
        batches: iterated anew at every pass.
        workers: processes that read images; None takes one per CPU core, at most 8, and none for images in memory.
        pin_memory: for copies to a GPU that do not stall.
    """
    if workers is None:
        workers = 0 if images.dataset.in_memory else min(8, os.cpu_count() or 1)
    collate_function: Callable[[list[Item]], Batch] = collate
    return DataLoader(
        images,
        batch_sampler=batches,  # pyright: ignore[reportArgumentType] - draws are pairs, torch's stub wants ints
        collate_fn=collate_function,
        num_workers=workers,
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
    )


class TimedBatches:
    """The batches of a loader.

    Args:
        loader: of `make_loader`.

    Attributes:
        seconds: how long this pass has waited for batches, the start of worker processes included.
    """

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader = loader
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        self.seconds, started = 0.0, perf_counter()
        for batch in self.loader:
            self.seconds += perf_counter() - started
            yield batch
            started = perf_counter()


def evaluation_loader(
    dataset: Dataset,
    transform: TransformConfig,
    *,
    indices: Iterable[int] | None = None,
    batch_size: int = 128,
    workers: int | None = None,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """A loader of `Batch` over the images of a dataset in order, or over some of them, for evaluation."""
    order = [(index, 0) for index in (range(len(dataset)) if indices is None else indices)]
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    images = TransformedImages(dataset, transform, training=False)
    return make_loader(images, batches, workers=workers, pin_memory=pin_memory)
