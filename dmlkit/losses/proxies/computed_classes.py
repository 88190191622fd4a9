"""Classes whose similarities a loss looks at before it walks over them, computed once where memory allows."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from dmlkit.losses.proxies.classes import Block, Classes

BlockAndLeaves = tuple[Block, tuple[Tensor, ...]]
"""With the tensors that its graph begins with."""


@dataclass(frozen=True)
class ComputedClasses(Classes):
    """Classes whose blocks are there already, for any walks without graph and one with it."""

    ready: list[BlockAndLeaves] = field(default_factory=list[BlockAndLeaves])

    def blocks(self, *, with_graph: bool = False) -> Iterator[BlockAndLeaves]:
        if not self.ready:
            yield from super().blocks(with_graph=with_graph)
        waiting = self.ready[::-1]
        if with_graph:  # a second such walk computes them anew
            self.ready.clear()
        while waiting:  # each is freed once it is taken
            yield waiting.pop()


def computed_once(classes: Classes) -> Classes:
    """The same classes, for one product instead of two; as they are where they may not wait, or nothing learns."""
    if not classes.keep or not torch.is_grad_enabled():
        return classes
    ready = list(classes.blocks(with_graph=True))
    return ComputedClasses(**{one.name: getattr(classes, one.name) for one in fields(Classes)}, ready=ready)
