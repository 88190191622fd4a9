"""Tuning of the last blocks: the general features of the first ones stay."""

from typing import Literal

from pydantic import PositiveInt
from torch import nn

from dmlkit.backbones.tuning.base import Blocks, TuningConfig, poolings
from dmlkit.errors import UserError


class LastBlocksConfig(TuningConfig, frozen=True):
    """The last blocks train, with what follows them; what comes before is frozen, and costs no backward pass."""

    name: Literal["last_blocks"] = "last_blocks"
    blocks: PositiveInt = 1
    """How many. A block is a residual, transformer or inception block; of timm's ConvNeXt, Swin and EfficientNet a
    whole stage."""

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        found = blocks()
        if self.blocks > len(found):
            raise UserError(
                f"backbone.tuning.blocks: got {self.blocks}, expected at most {len(found)}, the blocks that this "
                "backbone has; to train all of it take tuning: {name: full}"
            )
        return [*found[-self.blocks :], *poolings(backbone)]
