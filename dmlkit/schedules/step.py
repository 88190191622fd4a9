"""A learning rate that decreases by a factor every few epochs."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from dmlkit.schedules.base import ScheduleConfig


class StepConfig(ScheduleConfig, frozen=True):
    """Learning rate multiplied by ``gamma`` once per ``every`` epochs."""

    name: Literal["step"] = "step"
    every: PositiveInt = 10
    """Epochs between two decreases."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor of each decrease."""

    def after_warmup(self, epoch: float, epochs: int) -> float:
        return self.gamma ** (int(epoch) // self.every)
