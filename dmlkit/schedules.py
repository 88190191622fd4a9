"""Learning-rate schedules, as factors of the learning rate."""

from abc import abstractmethod
from math import cos, pi
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from dmlkit.component import ComponentConfig, import_on_demand

__all__ = ["ConstantConfig", "CosineConfig", "ScheduleConfig", "StepConfig"]


class ScheduleConfig(ComponentConfig, frozen=True):
    """Root of the schedule family."""

    spans_training: ClassVar[bool] = True
    """Whether the factor depends on the number of all epochs, so that more of them change those before."""

    warmup_epochs: NonNegativeFloat = 0.0
    """Number of epochs, possibly fractional, over which the factor rises linearly from 0."""

    def factor(self, epoch: float, epochs: int) -> float:
        """Return the factor at ``epoch`` (possibly fractional) out of ``epochs``.

        Example:
            >>> from dmlkit.schedules import CosineConfig
            >>> CosineConfig(warmup_epochs=2.0).factor(epoch=1.0, epochs=10)
            0.5
        """
        if epoch < self.warmup_epochs:
            return epoch / self.warmup_epochs
        return self.after_warmup(epoch, epochs)

    @abstractmethod
    def after_warmup(self, epoch: float, epochs: int) -> float:
        """Return the factor after the warm-up."""


class ConstantConfig(ScheduleConfig, frozen=True):
    """The same learning rate throughout."""

    spans_training: ClassVar = False
    name: Literal["constant"] = "constant"

    def after_warmup(self, epoch: float, epochs: int) -> float:
        return 1.0


class CosineConfig(ScheduleConfig, frozen=True):
    """Half a cosine from the end of the warm-up to ``final`` at the end of training (Loshchilov & Hutter 2017)."""

    name: Literal["cosine"] = "cosine"
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the learning rate at the end."""

    def after_warmup(self, epoch: float, epochs: int) -> float:
        progress = min(1.0, (epoch - self.warmup_epochs) / max(epochs - self.warmup_epochs, 1e-12))
        return self.final + (1 - self.final) * (1 + cos(pi * progress)) / 2


class StepConfig(ScheduleConfig, frozen=True):
    """Learning rate multiplied by ``gamma`` once per ``every`` epochs."""

    spans_training: ClassVar = False
    name: Literal["step"] = "step"
    every: PositiveInt = 10
    """Epochs between two decreases."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor of each decrease."""

    def after_warmup(self, epoch: float, epochs: int) -> float:
        return self.gamma ** (int(epoch) // self.every)


import_on_demand(__name__)
