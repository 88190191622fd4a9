"""No tuning: the backbone stays as it is."""

from collections.abc import Iterable
from typing import Literal

from torch import nn

from dmlkit.backbones.tuning.base import Blocks, TuningConfig
from dmlkit.component import Requirement


class NoTuningConfig(TuningConfig, frozen=True):
    """The backbone is frozen for good, its batch norms and dropout too; head and loss train on its features."""

    name: Literal["none"] = "none"

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        return []

    def requirements(self) -> Iterable[Requirement]:
        frozen = "nothing of the backbone ever trains"
        yield Requirement("backbone.freeze_epochs", (0,), frozen)
        yield Requirement("optimizer.lr_multipliers.backbone", (1.0,), frozen)
