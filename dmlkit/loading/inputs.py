"""Inputs of a model, sample by sample: transformed images or vectors, and messages on unreadable images."""

import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.errors import MOST_NAMED, UserError, merged, some_of
from dmlkit.files.image_file import MAX_PIXELS, BadImageError
from dmlkit.transforms.base import Resizing, TransformConfig

Draw = tuple[int, int]
"""Index of a sample and seed of its augmentation."""


class Item(NamedTuple):
    """Sample of a batch, or the message why it could not be read."""

    input: Tensor | None
    label: int
    row: int  # index in the dataset
    fault: str = ""


class Batch(NamedTuple):
    """Samples that could be read, and messages on the others."""

    inputs: Tensor  # (B, 3, S, S) uint8; (B, F) float32 for vectors
    labels: Tensor  # (B,) int64
    indices: Tensor  # (B,) int64, into the dataset
    lost: dict[int, str]  # a message per sample that could not be read, by its index

    @property
    def faults(self) -> list[str]:
        return list(self.lost.values())


class Inputs(torch.utils.data.Dataset[Item], ABC):
    """Samples of a dataset, prepared as inputs of a model."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    @abstractmethod
    def __getitem__(self, draw: Draw) -> Item:
        """Return a sample; the seed of the draw determines its augmentation, if there is one."""


class TransformedImages(Inputs):
    """Transformed images of a dataset.

    Augmentation is seeded per draw, so that pixels depend neither on the number of workers nor on interruptions.
    """

    def __init__(self, dataset: Dataset, transform: TransformConfig, *, training: bool) -> None:
        super().__init__(dataset)
        self.resizing = transform.resizing
        self.transform = transform.training() if training else transform.evaluation()
        self.augmentations = [augmentation.build() for augmentation in transform.augment] if training else []
        self.augments = bool(self.augmentations) or (training and transform.augments)

    def __getitem__(self, draw: Draw) -> Item:
        index, seed = draw
        try:
            image, label = self.dataset[index]
            if fault := self.dataset.kind.fault(image):  # of a plug-in; fractions up to 1 would become black
                raise BadImageError(f"{self.dataset.paths[index]}: {fault}, expected an image (3, H, W) uint8")
            check_resized(image, self.resizing, self.dataset.paths[index])
        except BadImageError as error:
            return Item(None, 0, index, str(error))
        if not self.augments:
            return Item(self.transform(image), label, index)
        with seeded(seed):
            shown = self.transform(image)
            if self.augmentations:
                shown = shown.contiguous()  # color_jitter takes 4.2 ms on planes, 5.0 on pixels with adjacent colors
            for augmentation in self.augmentations:
                shown = augmentation(shown)
            return Item(shown, label, index)


class PlainSamples(Inputs):
    """Samples of a dataset, unchanged."""

    def __getitem__(self, draw: Draw) -> Item:
        index, _ = draw
        sample, label = self.dataset[index]
        return Item(sample, label, index)


def inputs_of(dataset: Dataset, transform: TransformConfig | None, *, training: bool) -> Inputs:
    """Return a dataset's samples as inputs of a model; see `TransformedImages`. Only images are transformed."""
    if transform is None or not dataset.kind.has_pixels:
        return PlainSamples(dataset)
    return TransformedImages(dataset, transform, training=training)


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Seed torch's random numbers on the CPU within the block, and restore their state afterwards.

    Only the CPU's generator is seeded, because ``torch.manual_seed`` also records a stack trace for each uninitialized
    device, which takes longer than the augmentation of an image.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def check_resized(image: Tensor, resizing: Resizing, path: str) -> None:
    """Raise a `BadImageError` if an image (3, H, W) would exceed the limit of decoding after resizing.

    Resized to a shorter side of 256 pixels, an image of 60 000 x 2, a PNG of 196 bytes, would take 6 GB.
    """
    height, width = image.shape[1:]
    rows, columns = resizing.size_of(height, width)
    if rows * columns > MAX_PIXELS:
        raise BadImageError(
            f"{path}: the image of {width} x {height} pixels would have {columns} x {rows} when resized to "
            f"{resizing.text}; expected at most {MAX_PIXELS:,} pixels"
        )


SKIP = "skip such images with dataset.on_bad_image=skip"


def refuse_faults(faults: Sequence[str], on_bad_image: str, way: str = f"repair or remove it, or {SKIP}") -> None:
    """Raise a `UserError` for unreadable images, if ``on_bad_image`` is "error"; ``way`` says what to do."""
    if faults and on_bad_image == "error":
        raise UserError(f"{merged(faults)[0]}; {way}")


def refuse_missing(
    dataset: Dataset, on_bad_image: str, source: str, way: str = f"set dataset.root if they have moved, or {SKIP}"
) -> None:
    """Raise an error for images whose files are gone, before hours of training, without opening any.

    With ``on_bad_image`` "skip" it is only an error if all are gone; ``way`` says what to do but restore them.
    """
    has_files = dataset.kind.has_pixels and len(dataset) and (dataset.file(0) or dataset.box(0)) is not None
    files = list(dataset.paths) if has_files else []
    gone = [path for path in files if not os.path.exists(path)]  # noqa: PTH110 - in a fifth of the time
    if gone and on_bad_image == "error":
        others = f", also {some_of(gone[1:], MOST_NAMED - 1)}" if gone[1:] else ""
        raise UserError(
            f"{gone[0]}: no such file; {len(gone):,} of the {len(files):,} images of {source} are missing{others}: "
            f"restore them, {way}"
        )
    refuse_nothing_read(len(files) - len(gone), [f"{path}: no such file" for path in gone], source)


def refuse_nothing_read(images_read: int, faults: Sequence[str], source: str) -> None:
    """Raise a `UserError` if no image could be read, even if such images are to be skipped: a disk may be unmounted."""
    if faults and not images_read:
        if len(faults) == 1:
            raise UserError(f"{source}: the only image could not be read: {faults[0]}")
        raise UserError(f"{source}: none of {len(faults):,} images could be read; the first: {faults[0]}")
