"""A dataset: stripes, whose angle is their class."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.dataset import Dataset


class ToyStripesConfig(DatasetConfig, frozen=True):
    """Stripes at as many angles as there are classes; every second class trains, the others test."""

    name: Literal["toy_stripes"] = "toy_stripes"
    classes: Annotated[int, Field(ge=8, le=100)] = 16
    """Angles."""
    images_per_class: Annotated[int, Field(ge=2, le=100)] = 6
    """Shifts of the stripes."""

    def load(self, split: Literal["train", "test", "all"]) -> "ToyStripes":
        angles = range(self.classes)
        chosen = {"train": angles[::2], "test": angles[1::2], "all": angles}[split]
        return ToyStripes([angle / self.classes for angle in chosen], self.images_per_class)


class ToyStripes(Dataset):
    """Images of stripes.

    Args:
        angles: of each class, in half turns.
        images_per_class: shifts of each.
    """

    in_memory = True

    def __init__(self, angles: list[float], images_per_class: int) -> None:
        names = [f"{180 * angle:.1f} degrees" for angle in angles]
        super().__init__(
            torch.arange(len(names)).repeat_interleave(images_per_class),
            names,
            [f"{name}/{image}" for name in names for image in range(images_per_class)],
        )
        self.angles, self.images_per_class = angles, images_per_class

    def sample(self, index: int) -> Tensor:
        label, shift = divmod(index, self.images_per_class)
        angle = torch.tensor(self.angles[label] * torch.pi)
        place = torch.arange(16.0)
        wave = place[:, None] * angle.cos() + place * angle.sin() + shift
        return ((wave.sin() + 1) * 127).to(torch.uint8).expand(3, -1, -1)
