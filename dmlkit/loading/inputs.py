"""What a model takes, sample by sample: images transformed, or vectors as they are, and bad ones told apart."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import BadImageError, Dataset
from dmlkit.errors import UserError
from dmlkit.loading.sizes import check_resized
from dmlkit.transforms.base import TransformConfig
from dmlkit.transforms.cropping.windows import Cut, WindowTransform, draw_cut, show_cuts

Draw = tuple[int, int]
"""The index of a sample and the seed of its augmentation."""


class Item(NamedTuple):
    """A sample of a batch, or what is wrong with it."""

    input: Tensor | Cut | None
    label: int
    row: int  # in the dataset
    fault: str = ""


class Batch(NamedTuple):
    """Samples that could be read, and what is wrong with the others."""

    inputs: Tensor  # (B, 3, S, S) uint8; (B, 3, H, W) with plans; (B, F) float32 of vectors
    labels: Tensor  # (B,) int64
    indices: Tensor  # (B,) int64, into the dataset
    faults: list[str]  # one message per sample that could not be read
    plans: Tensor | None = None  # (B, 7) int64: how the device makes (B, 3, S, S) of the inputs


class Inputs(torch.utils.data.Dataset[Item], ABC):
    """Samples of a dataset as a model takes them.

    Args:
        dataset: the samples.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    @abstractmethod
    def __getitem__(self, draw: Draw) -> Item:
        """A sample; the seed of the draw decides its augmentation, if there is one."""

    def on_device(self, batch: Batch, device: torch.device) -> Tensor:
        """What the model takes of a batch, on a device, without waiting for the copy."""
        return batch.inputs.to(device, non_blocking=True)


class TransformedImages(Inputs):
    """Images of a dataset, transformed. Augmentation is seeded per draw: neither the number of workers nor an
    interruption changes a pixel.

    Args:
        dataset: the images.
        transform: what to do with each.
        training: take the transform for training, not the one for evaluation.
        on_device: cut the augmentation's window out and leave it to the device to show it.

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
        super().__init__(dataset)
        self.resizing = transform.resizing
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

    def on_device(self, batch: Batch, device: torch.device) -> Tensor:
        """The images (B, 3, S, S) uint8 of a batch on a device, without waiting for the copy."""
        images = super().on_device(batch, device)
        if batch.plans is None or self.windows is None:
            return images
        plans = batch.plans.to(device, non_blocking=True)
        return show_cuts(images, plans, self.windows.size, self.windows.interpolation)


class PlainVectors(Inputs):
    """Vectors of a dataset, as they are."""

    def __getitem__(self, draw: Draw) -> Item:
        index, _ = draw
        vector, label = self.dataset[index]
        return Item(vector, label, index)


def inputs_of(
    dataset: Dataset, transform: TransformConfig | None, *, training: bool, on_device: bool = False
) -> Inputs:
    """The samples of a dataset as a model takes them; see `TransformedImages`. Vectors are not transformed."""
    if dataset.num_features is not None or transform is None:
        return PlainVectors(dataset)
    return TransformedImages(dataset, transform, training=training, on_device=on_device)


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
