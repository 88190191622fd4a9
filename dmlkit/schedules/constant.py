"""A constant learning rate."""

from typing import Literal

from dmlkit.schedules.base import ScheduleConfig


class ConstantConfig(ScheduleConfig, frozen=True):
    """The same learning rate throughout."""

    name: Literal["constant"] = "constant"

    def after_warmup(self, epoch: float, epochs: int) -> float:
        return 1.0
