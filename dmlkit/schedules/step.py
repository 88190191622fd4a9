"""A learning rate that falls by a factor every few epochs."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from dmlkit.schedules.base import ScheduleConfig


class StepConfig(ScheduleConfig, frozen=True):
    """Multiply by ``gamma`` every ``every`` epochs."""

    name: Literal["step"] = "step"
    every: PositiveInt = 10  # epochs
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.5

    def after_warmup(self, epoch: float, epochs: int) -> float:
        return self.gamma ** (int(epoch) // self.every)
