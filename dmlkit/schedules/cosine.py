"""A learning rate that decreases along half a cosine."""

from math import cos, pi
from typing import Annotated, Literal

from pydantic import Field

from dmlkit.schedules.base import ScheduleConfig


class CosineConfig(ScheduleConfig, frozen=True):
    """Half a cosine from the end of the warm-up to ``final`` at the end of training (Loshchilov & Hutter 2017)."""

    name: Literal["cosine"] = "cosine"
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the learning rate at the end."""

    def after_warmup(self, epoch: float, epochs: int) -> float:
        progress = min(1.0, (epoch - self.warmup_epochs) / max(epochs - self.warmup_epochs, 1e-12))
        return self.final + (1 - self.final) * (1 + cos(pi * progress)) / 2
