"""The tuning interface: which modules of a backbone train."""

from collections.abc import Callable

from torch import nn

from dmlkit.component import ComponentConfig
from dmlkit.pooling.base import Pooling

Blocks = Callable[[], list[nn.Module]]
"""Gives the blocks of a backbone from input to output; raises UserError for a backbone without any."""


class TuningConfig(ComponentConfig, frozen=True):
    """Root of the tuning family. Head and loss train whole in all of them."""

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        """The modules whose own weights train, with all in them; the rest of the backbone is frozen.

        Args:
            backbone: with the weights that it starts from.
            blocks: of it.

        Raises:
            UserError: the backbone cannot be tuned like this.
        """
        raise NotImplementedError

    def adapt(self, backbone: nn.Module) -> None:
        """Add to the frozen modules what trains in their place; nothing unless a member says so.

        Raises:
            UserError: the backbone has nothing to add to.
        """


def poolings(backbone: nn.Module) -> list[nn.Module]:
    """The pooling of a backbone: it comes last, and trains where it has anything to learn and the recipe says so."""
    return [module for module in backbone.modules() if isinstance(module, Pooling)]
