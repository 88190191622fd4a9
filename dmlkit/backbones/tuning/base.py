"""Interface of the tunings, which choose the modules of a backbone that train."""

from collections.abc import Callable

from torch import nn

from dmlkit.component import ComponentConfig
from dmlkit.pooling import Pooling

Blocks = Callable[[], list[nn.Module]]
"""Function that returns the blocks of a backbone from input to output, or raises UserError if it has none."""


class TuningConfig(ComponentConfig, frozen=True):
    """Root of the tuning family. With every tuning, all weights of the head and the loss train."""

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        """Return the modules that train, with their submodules; the rest of the backbone is frozen.

        Args:
            backbone: backbone with its initial weights.
            blocks: function that returns the backbone's blocks.

        Raises:
            UserError: the backbone does not support this tuning.
        """
        raise NotImplementedError

    def adapt(self, backbone: nn.Module) -> None:
        """Add trainable parameters to the frozen modules; the default adds none.

        Raises:
            UserError: the backbone has no module to add them to.
        """


def poolings(backbone: nn.Module) -> list[nn.Module]:
    """Return the pooling modules of a backbone, which follow its blocks and train if they have parameters."""
    return [module for module in backbone.modules() if isinstance(module, Pooling)]
