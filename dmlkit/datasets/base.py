"""The dataset interface: labelled images of one split, and how validation classes are cut from training ones."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import ceil
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from dmlkit.component import ComponentConfig
from dmlkit.errors import UserError

Split = Literal["train", "validation", "test", "all"]


class Dataset(ABC):
    """Labelled images.

    Args:
        labels: (N,) int64 in 0..C-1.
        class_names: C names; ``labels`` index them.
        paths: N names that identify the images, for files their paths.

    Attributes:
        in_memory: images cost nothing to read, so loading them needs no worker processes.
    """

    in_memory = False

    def __init__(self, labels: Tensor, class_names: Sequence[str], paths: Sequence[str]) -> None:
        self.labels = labels
        self.class_names = tuple(class_names)
        self.paths = tuple(paths)

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def image(self, index: int) -> Tensor:
        """Image ``index`` as (3, H, W) uint8 RGB.

        Raises:
            BadImageError: the file cannot be decoded.
        """

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.image(index), int(self.labels[index])


class BadImageError(UserError):
    """An image file that cannot be read."""


class ClassSubset(Dataset):
    """The images of some classes of a dataset, relabelled 0..C'-1 in the order given.

    Args:
        dataset: the whole.
        classes: labels to keep.
    """

    def __init__(self, dataset: Dataset, classes: Sequence[int]) -> None:
        relabel = torch.full((len(dataset.class_names),), -1)
        relabel[list(classes)] = torch.arange(len(classes))
        labels = relabel[dataset.labels]
        self.indices = (labels >= 0).nonzero()[:, 0].tolist()
        super().__init__(
            labels[self.indices],
            [dataset.class_names[label] for label in classes],
            [dataset.paths[index] for index in self.indices],
        )
        self.dataset = dataset
        self.in_memory = dataset.in_memory

    def image(self, index: int) -> Tensor:
        return self.dataset.image(self.indices[index])


class DatasetConfig(ComponentConfig, frozen=True):
    """Root of the dataset family."""

    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the training classes, the last of them, that is held out to choose the best checkpoint."""
    on_bad_image: Literal["error", "skip"] = "error"
    """Whether an image that cannot be read stops the command, or is left out and listed in the summary."""

    def build(self, split: Split) -> Dataset:
        """The images of a split; validation classes are cut from the training classes, never from test.

        Raises:
            UserError: files are missing, or too few classes are left for the split.
        """
        if split in ("test", "all"):
            return self.load(split)
        whole = self.load("train")
        count = len(whole.class_names)
        held_out = ceil(count * self.validation_fraction)
        if count - held_out < 1 or (split == "validation" and held_out < 1):
            raise UserError(
                f"dataset.validation_fraction: {self.validation_fraction} of {count} training classes leaves "
                f"{count - held_out} to train and {held_out} to validate; expected at least one of each"
            )
        kept = range(count - held_out) if split == "train" else range(count - held_out, count)
        return ClassSubset(whole, kept)

    def load(self, split: Literal["train", "test", "all"]) -> Dataset:
        """The images of the official split; ``train`` still holds the validation classes."""
        raise NotImplementedError
