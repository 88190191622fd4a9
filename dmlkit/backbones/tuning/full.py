"""Full tuning, in which all weights train."""

from typing import Literal

from torch import nn

from dmlkit.backbones.tuning.base import Blocks, TuningConfig


class FullTuningConfig(TuningConfig, frozen=True):
    """All weights of the backbone train."""

    name: Literal["full"] = "full"

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        return [backbone]
