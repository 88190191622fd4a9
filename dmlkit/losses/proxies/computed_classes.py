"""Classes whose similarities a loss looks at before it walks over them, computed once where memory allows."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch

from dmlkit.losses.proxies.classes import Block, Classes


@dataclass(frozen=True)
class ComputedClasses(Classes):
    """Classes whose blocks are there already, for any walks without graph and one with it."""

    ready: list[Block] = field(default_factory=list[Block])

    def blocks(self, *, with_graph: bool = False) -> Iterator[Block]:
        if not with_graph:
            yield from self.ready or super().blocks()
        elif not self.ready:  # a second such walk computes them anew
            yield from super().blocks(with_graph=True)
        while with_graph and self.ready:  # the last first, which is still in the cache; each is freed once it is taken
            yield self.ready.pop()


def computed_once(classes: Classes) -> Classes:
    """The same classes, for one product instead of two; as they are where they may not wait, or nothing learns."""
    if not classes.keep or not torch.is_grad_enabled():
        return classes
    ready = list(classes.blocks(with_graph=True))
    return ComputedClasses(**{one.name: getattr(classes, one.name) for one in fields(Classes)}, ready=ready)
