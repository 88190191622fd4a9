"""Classes whose similarities a loss needs before its pass over the blocks, computed once if memory allows."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch

from dmlkit.losses.proxies.classes import Block, Classes


@dataclass(frozen=True)
class ComputedClasses(Classes):
    """Classes whose blocks are already computed, for any number of passes without a graph and one with it."""

    ready: list[Block] = field(default_factory=list[Block])

    def blocks(self, *, with_graph: bool = False) -> Iterator[Block]:
        if not with_graph:
            yield from self.ready or super().blocks()
        elif not self.ready:  # a second such pass computes them again
            yield from super().blocks(with_graph=True)
        while with_graph and self.ready:  # last first because it is still in the cache; each is freed after use
            yield self.ready.pop()


def computed_once(classes: Classes) -> Classes:
    """Return the classes with computed blocks; return them unchanged if blocks may not be kept or nothing learns."""
    if not classes.keep or not torch.is_grad_enabled():
        return classes
    ready = list(classes.blocks(with_graph=True))
    return ComputedClasses(**{one.name: getattr(classes, one.name) for one in fields(Classes)}, ready=ready)
