"""Gradient checkpointing: the activations of each block are recomputed in the backward pass instead of stored."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dmlkit.backbones.base import Backbone
from dmlkit.errors import UserError


def recompute_blocks(backbone: Backbone) -> None:
    """Store only the inputs of the blocks for the backward pass (Chen et al. 2016, arXiv:1604.06174).

    Gradients and buffers, such as the statistics of batch norms, stay bit-identical; the state dict does not change.

    Raises:
        ValueError: the backbone has no blocks that are modules.

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
    composed = [part for part in parts if next(part.children(), None) is not None]  # a layer stores little else
    if not composed:
        raise ValueError("this backbone has no blocks that can be recomputed; remove this key")
    for block in composed:
        block.forward = RecomputedForward(block)


class RecomputedForward:
    """Forward pass of a block that runs again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.forward = block.forward

    # torch.compile compiles the block, not this wrapper
    @torch.compiler.disable(recursive=False)  # pyright: ignore[reportUntypedFunctionDecorator] - torch gives no type
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **options)
        return checkpoint(self.forward, *inputs, use_reentrant=False, context_fn=self._contexts, **options)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the forward pass and of its repetition."""
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
