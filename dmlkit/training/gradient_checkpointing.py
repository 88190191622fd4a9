"""Gradient checkpointing: what blocks would keep for the backward pass is computed again, block by block."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dmlkit.backbones.base import Backbone
from dmlkit.errors import UserError


def recompute_blocks(backbone: Backbone) -> None:
    """Keep for the backward pass no more than the inputs of the blocks (Chen et al. 2016, arXiv:1604.06174).

    Gradients and buffers, such as the statistics of batch norms, come out the same to the bit.

    Args:
        backbone: whose blocks are wrapped; its state dict stays as it is.

    Raises:
        ValueError: it has no blocks that are modules of their own.

    Example:
        >>> from dmlkit.backbones import ResNet
        >>> backbone = ResNet(18)
        >>> recompute_blocks(backbone)
        >>> backbone(torch.rand(2, 3, 32, 32)).sum().backward()
        >>> backbone.network.layer1[0].bn1.num_batches_tracked
        tensor(1)
    """
    try:
        blocks = backbone.blocks()
    except UserError:
        blocks = []
    parts = [part for block in blocks for part in (block if isinstance(block, nn.ModuleList) else [block])]
    wholes = [part for part in parts if next(part.children(), None) is not None]  # a layer keeps little but its input
    if not wholes:
        raise ValueError("this backbone has no blocks that are modules of their own; leave it out")
    for block in wholes:
        block.forward = RecomputedForward(block)


class RecomputedForward:
    """The forward pass of a block, which runs again when the backward pass comes to it.

    Args:
        block: with its own forward pass.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.forward = block.forward

    # torch.compile takes the block, not what surrounds it
    @torch.compiler.disable(recursive=False)  # pyright: ignore[reportUntypedFunctionDecorator] - torch gives no type
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **options)
        return checkpoint(self.forward, *inputs, use_reentrant=False, context_fn=self._contexts, **options)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Of the forward pass, and of its repetition."""
        return nullcontext(), self._keep_buffers()

    @contextmanager
    def _keep_buffers(self) -> Generator[None]:
        buffers = list(self.block.buffers())
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
