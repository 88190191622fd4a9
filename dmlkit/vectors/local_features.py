"""Local features of images: patches of a run's own network, which galleries keep next to the points."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.files.source import LOCAL
from dmlkit.model import EmbeddingModel
from dmlkit.pooling import Pooling
from dmlkit.vectors.in_memory import embed_dataset
from dmlkit.vectors.manifest import LocalFusion
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.trained import TrainedModel

LEAST_CELLS = 64  # of a map: on the 5 x 5 cells of the last map of Lite0 at 160 pixels, matches say little
BLOCK = 256  # images whose patches are centered at once


def maps_of(trained: TrainedModel, ranks: Ranks, dataset: Dataset, rows: Tensor, bar: Bar = no_bar) -> Tensor:
    """Return the cells (N, P, C) float16 of the maps of images, from which `centered` makes features of patches.

    They are those of the last map of a block of convolutions with at least `LEAST_CELLS` cells, or the tokens of a
    transformer.

    Args:
        rows: (N,) indices of the images, all of which can be read.
    """
    if not trained.samples.has_pixels:
        raise UserError(f"--with {LOCAL}: matches patches of images, got {trained.samples.name}s; leave it out")
    require_one_process(ranks)
    with bar("features of patches", len(rows)) as advance, kept_maps(trained.model) as maps:
        embed_dataset(
            ranks,
            trained.model,
            dataset,
            trained.recipe.transform,
            indices=rows.tolist(),
            workers=trained.recipe.training.workers if len(rows) > BLOCK else 0,
            advance=advance,
        )
    return torch.cat(maps)


@contextmanager
def kept_maps(model: EmbeddingModel) -> Generator[list[Tensor]]:
    """Yield a list to which the cells (n, P, C) float16 of each batch are appended that the network embeds."""
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
    convolutions = {one: sum(isinstance(part, nn.Conv2d) for part in one.modules()) for one in network.modules()}
    blocks = [one for one, count in convolutions.items() if isinstance(one, Pooling) or count > 1]
    handles = [one.register_forward_hook(keep) for one in blocks if one is not network]
    handles.append(network.register_forward_hook(end))
    try:
        yield parts
    finally:
        for handle in handles:
            handle.remove()


def mean_of(maps: Tensor) -> Tensor:
    """Return the mean (C,) of all cells of maps (N, P, C)."""
    return torch.stack([part.float().mean((0, 1)) for part in maps.split(BLOCK)]).mean(0)


def centered(maps: Tensor, mean: Tensor) -> Tensor:
    """Return cells (N, P, C) less a mean (C,), as unit vectors in float16."""
    return torch.cat([nn.functional.normalize(part.float() - mean, dim=-1).half() for part in maps.split(BLOCK)])


def features_of(
    local: LocalFusion, trained: TrainedModel, ranks: Ranks, dataset: Dataset, rows: Tensor, bar: Bar = no_bar
) -> Tensor:
    """Return the local features (N, P, C) float16 of images, to be compared with others of the same fusion."""
    return centered(maps_of(trained, ranks, dataset, rows, bar), torch.tensor(local.mean))


@contextmanager
def batch_features(local: LocalFusion, trained: TrainedModel) -> Generator[Callable[[], Tensor]]:
    """Yield a function that returns the local features (n, P, C) float16 of the batch that the model embedded last."""
    mean = torch.tensor(local.mean)
    with kept_maps(trained.model) as maps:
        yield lambda: centered(maps.pop(), mean)


def require_one_process(ranks: Ranks) -> None:
    """Raise a `UserError` if there are several processes."""
    if ranks.world_size > 1:
        raise UserError(f"--with {LOCAL}: runs in one process, got {ranks.world_size}; start it without ranks")
