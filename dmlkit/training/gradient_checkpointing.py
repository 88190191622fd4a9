"""Activations that the backward pass recomputes instead of storing them: of blocks, or of chunks of the batch."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dmlkit.backbones.base import Backbone
from dmlkit.errors import UserError


def recompute_blocks(backbone: Backbone) -> None:
    """Store only the inputs of the blocks for the backward pass (Chen et al. 2016, arXiv:1604.06174).

    Gradients and buffers, such as the statistics of batch norms, stay bit-identical; the state dict does not change.

    Example:
        >>> from dmlkit.backbones import ResNet18
        >>> backbone = ResNet18()
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


def recompute_chunks(model: nn.Module, chunk: int) -> None:
    """Embed at most ``chunk`` samples at a time, and each chunk again in the backward pass.

    This is the gradient cache of Gao et al. 2021 (arXiv:2101.06983): memory is needed for the activations of one chunk
    and for the embeddings (B, D) of the batch, and the loss still compares all of them. Gradients equal those of one
    pass to rounding, unless batch norms compute statistics, which are then those of a chunk. A chunk is computed again
    with the same random numbers, and does not update the statistics of batch norms twice. A batch is split evenly, into
    chunks that differ by at most one sample.

    Example:
        >>> model, samples = nn.Linear(4, 2), torch.rand(7, 4)
        >>> (plain,) = torch.autograd.grad(model(samples).square().sum(), model.weight)
        >>> recompute_chunks(model, 3)
        >>> (cached,) = torch.autograd.grad(model(samples).square().sum(), model.weight)
        >>> torch.allclose(cached, plain)
        True
    """
    model.forward = ChunkedForward(model, chunk)


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
        repetition = {"context_fn": lambda: (nullcontext(), self._keep_buffers())}  # of the backward pass
        return checkpoint(self.forward, *inputs, use_reentrant=False, **repetition, **options)

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


class ChunkedForward(RecomputedForward):
    """Forward pass of a model, chunk by chunk; each chunk runs again in the backward pass."""

    def __init__(self, model: nn.Module, chunk: int) -> None:
        super().__init__(model)
        self.chunk = chunk

    def __call__(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or len(inputs) <= self.chunk:
            return self.forward(inputs)
        points: list[Tensor] = []
        for part in inputs.tensor_split(ceil(len(inputs) / self.chunk)):
            # otherwise chunks share the half-precision copies of weights, and their gradients are summed in 8 bits
            torch.clear_autocast_cache()
            points.append(super().__call__(part))
        return torch.cat(points)
