"""Tuning of the last blocks, which keeps the general features of the first ones."""

from typing import Literal

from pydantic import PositiveInt
from torch import nn

from dmlkit.backbones.tuning.base import Blocks, TuningConfig, poolings
from dmlkit.errors import UserError


class LastBlocksConfig(TuningConfig, frozen=True):
    """The last blocks and the layers after them train; earlier layers are frozen and need no backward pass."""

    name: Literal["last_blocks"] = "last_blocks"
    blocks: PositiveInt = 1
    """Number of blocks. A block is a residual, transformer or inception block; in timm's ConvNeXt, Swin and
    EfficientNet it is a stage."""

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        found = blocks()
        if self.blocks > len(found):
            raise UserError(
                f"backbone.tuning.blocks: got {self.blocks}, expected at most {len(found)}, the number of blocks of "
                "this backbone; to train all weights use tuning: {name: full}"
            )
        return [*found[-self.blocks :], *poolings(backbone)]
