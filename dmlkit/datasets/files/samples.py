"""Kinds of samples: images, vectors, and those that plug-ins add. Only this file knows which kinds there are."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from io import BytesIO
from typing import Any, ClassVar, Self

import torch
from PIL import Image
from torch import Tensor

SIDE = 160  # pixels of the longer side of a small picture; as JPEG about 5 kB
QUALITY = 80


@dataclass(frozen=True)
class Samples(ABC):
    """Kind of the samples of a dataset: all that other code needs to know of them.

    A plug-in defines a kind as ``class Sounds(Samples, name="sound")``. Its datasets have an attribute ``kind``, and
    the configurations of its datasets and backbones have ``sample = "sound"``. Two kinds with equal options are equal.
    """

    kinds: ClassVar[dict[str, type["Samples"]]] = {}
    """All kinds by name."""
    name: ClassVar[str]
    """One sample, in messages: ``image``, ``vector``."""
    has_pixels: ClassVar[bool] = False
    """Whether samples are images (3, H, W) uint8 RGB: they are transformed, normalized, cached, and read from files."""
    has_angle: ClassVar[bool] = True
    """Whether the embedding of a sample of zeros has an angle to the others."""

    def __init_subclass__(cls, *, name: str, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = name
        Samples.kinds[name] = cls

    @property
    def num_features(self) -> int | None:
        """Number of coordinates of a vector, which its backbone is built for; None for other kinds."""
        return None

    @classmethod
    def of(cls, num_features: int | None) -> Self:  # noqa: ARG003 - for vectors
        """Return the kind; ``num_features`` is that of a dataset, for kinds that have it."""
        return cls()

    @abstractmethod
    def blank(self, size: int) -> Tensor:
        """Return a batch of one sample of zeros; an image has ``size`` pixels on each side."""

    def fault(self, sample: Tensor) -> str | None:
        """Return what is wrong with a sample of a dataset, or None."""
        blank = self.blank(1)[0]
        if sample.shape != blank.shape:
            return f"shape {tuple(sample.shape)}"
        return None if sample.dtype == blank.dtype else str(sample.dtype)

    def describe(self) -> str:
        """Return the samples in words, for messages."""
        return f"{self.name}s"

    def picture(self, sample: Tensor, side: int = SIDE) -> bytes | None:
        """Return a sample as a small JPEG of at most ``side`` pixels, or None if it cannot be shown."""
        return None


def samples_named(name: str) -> type[Samples]:
    """Return the kind that configurations of datasets and backbones name as ``sample``.

    Example:
        >>> samples_named("vector").of(8).describe()
        'vectors of 8 numbers'
    """
    if name not in Samples.kinds:
        raise ValueError(
            f"sample: got {name!r}, expected one of {', '.join(Samples.kinds)}; define it as in {__name__}"
        )
    return Samples.kinds[name]


class ImageSamples(Samples, name="image"):
    """Images (3, H, W) uint8 RGB.

    Example:
        >>> ImageSamples().blank(32).shape
        torch.Size([1, 3, 32, 32])
    """

    has_pixels = True

    def blank(self, size: int) -> Tensor:
        return torch.zeros(1, 3, size, size, dtype=torch.uint8)

    def fault(self, sample: Tensor) -> str | None:
        if sample.ndim != 3 or sample.shape[0] != 3 or not sample.numel():
            return f"shape {tuple(sample.shape)}"
        return None if sample.dtype == torch.uint8 else str(sample.dtype)

    def picture(self, sample: Tensor, side: int = SIDE) -> bytes:
        image = Image.fromarray(sample.permute(1, 2, 0).numpy())
        image.thumbnail((side, side))
        file = BytesIO()
        image.save(file, "JPEG", quality=QUALITY)
        return file.getvalue()


@dataclass(frozen=True)
class VectorSamples(Samples, name="vector"):
    """Vectors (F,) float32."""

    width: int | None  # F; None if it is not known
    has_angle = False

    @classmethod
    def of(cls, num_features: int | None) -> Self:
        return cls(num_features)

    @property
    def num_features(self) -> int | None:
        return self.width

    def blank(self, size: int) -> Tensor:
        return torch.zeros(1, self.width or 0)

    def describe(self) -> str:
        return f"vectors of {self.width} numbers"
