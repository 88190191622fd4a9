"""A learning rate that falls by a factor every few epochs."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from dmlkit.schedules.base import ScheduleConfig


class StepConfig(ScheduleConfig, frozen=True):
    """Multiply by ``gamma`` every ``every`` epochs."""

    name: Literal["step"] = "step"
    every: PositiveInt = 10
    """Epochs between two steps."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor of each step."""

    def after_warmup(self, epoch: float, epochs: int) -> float:
        return self.gamma ** (int(epoch) // self.every)
