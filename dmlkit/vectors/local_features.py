"""Local features of images: patches of a run's own network, which galleries keep next to the points."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dmlkit.errors import UserError
from dmlkit.files.source import LOCAL
from dmlkit.model import EmbeddingModel
from dmlkit.pooling import Pooling
from dmlkit.vectors.manifest import LocalFusion

LEAST_CELLS = 64  # of a map: on the 5 x 5 cells of the last map of Lite0 at 160 pixels, matches say little
BLOCK = 256  # images whose patches are centered at once


@contextmanager
def kept_maps(model: EmbeddingModel) -> Generator[list[Tensor]]:
    """Yield a list to which the cells (n, P, C) float16 of each batch are appended that the network embeds.

    They are those of the last map of a block of convolutions with at least `LEAST_CELLS` cells, or the tokens of a
    transformer.
    """
    last, parts = dict[str, Tensor](), list[Tensor]()

    def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        maps = inputs[0] if isinstance(module, Pooling) else output
        if isinstance(maps, Tensor) and maps.ndim == 4 and maps.shape[2] * maps.shape[3] >= LEAST_CELLS:
            last["maps"] = maps

    def end(*_: Any) -> None:
        if "maps" not in last:
            raise UserError(
                f"--with {LOCAL}: the network has no map of at least {LEAST_CELLS} cells; use larger images"
            )
        parts.append(last.pop("maps").flatten(2).transpose(1, 2).half().cpu())

    network = model.backbone
    convolutions = {block: sum(isinstance(part, nn.Conv2d) for part in block.modules()) for block in network.modules()}
    blocks = [block for block, count in convolutions.items() if isinstance(block, Pooling) or count > 1]
    with ExitStack() as hooks:
        for block in blocks:
            if block is not network:
                hooks.enter_context(block.register_forward_hook(keep))
        hooks.enter_context(network.register_forward_hook(end))
        yield parts


def centered(maps: Tensor, mean: Tensor) -> Tensor:
    """Return cells (N, P, C) less a mean (C,), as unit vectors in float16."""
    return torch.cat([nn.functional.normalize(part.float() - mean, dim=-1).half() for part in maps.split(BLOCK)])


def features_by(local: LocalFusion | None) -> Callable[[Tensor], Tensor] | None:
    """Return what makes local features of the maps of a batch; None without them."""
    return None if local is None else partial(centered, mean=torch.tensor(local.mean))
