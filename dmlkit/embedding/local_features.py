"""Local features of images: patches of a run's own network, or keypoints; galleries keep them next to the points."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.embedding.in_memory import Embeddings, embed_dataset, embed_images
from dmlkit.embedding.keypoints import Keypoints, keypoints_of, match_keypoints
from dmlkit.embedding.manifest import LocalFusion
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.trained import TrainedModel
from dmlkit.errors import UserError
from dmlkit.files.source import LOCAL, SIFT
from dmlkit.metrics.ranking.local import Match, patch_matches
from dmlkit.model import EmbeddingModel
from dmlkit.pooling import Pooling

LEAST_CELLS = 64  # of a map: on the 5 x 5 cells of the last map of Lite0 at 160 pixels, matches say little
BLOCK = 256  # images whose patches are centered at once


def maps_of(trained: TrainedModel, fabric: Ranks, dataset: Dataset, rows: Tensor, bar: Bar = no_bar) -> Tensor:
    """Return the cells (N, P, C) float16 of the maps of images, from which `centered` makes features of patches.

    They are those of the last map of a block of convolutions with at least `LEAST_CELLS` cells, or the tokens of a
    transformer.

    Args:
        trained: the model.
        fabric: the device; one process.
        dataset: the images.
        rows: (N,) indices of the images, all of which can be read.
        bar: shows the images.

    Raises:
        UserError: the samples are no images, the network has no such map, or there are several processes.
    """
    if not trained.samples.has_pixels:
        raise UserError(f"--with {LOCAL}: matches patches of images, got {trained.samples.name}s; leave it out")
    require_one_process(LOCAL, fabric)
    with bar("features of patches", len(rows)) as advance, kept_maps(trained.model) as maps:
        embed_dataset(
            fabric,
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
    """Yield a list, to which the cells (n, P, C) float16 of each batch are appended that the network embeds meanwhile.

    Raises:
        UserError: the network has no map of at least `LEAST_CELLS` cells.
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
    blocks = [one for one in network.modules() if isinstance(one, Pooling) or _convolutions(one) > 1]
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
    local: LocalFusion, trained: TrainedModel, fabric: Ranks, dataset: Dataset, rows: Tensor, bar: Bar = no_bar
) -> Tensor:
    """Return the local features (N, P, C) float16 of images, to be compared with others of the same fusion.

    Args:
        local: their kind, and the mean of all patches.
        trained, fabric, dataset, rows, bar: see `maps_of`.

    Raises:
        UserError: see `maps_of` and `keypoints_of`.
    """
    if local.run == SIFT:
        require_one_process(SIFT, fabric)
        return keypoints_of(dataset, rows, bar).packed
    return centered(maps_of(trained, fabric, dataset, rows, bar), torch.tensor(local.mean))


def embed_with_patches(
    trained: TrainedModel, local: LocalFusion, fabric: Ranks, dataset: Dataset, source: str, bar: Bar = no_bar
) -> Embeddings:
    """Embed images, and keep their patches, in one pass through the network.

    Raises:
        UserError: no image could be read, or see `maps_of` and `embed_dataset`.
    """
    require_one_process(LOCAL, fabric)
    with kept_maps(trained.model) as maps:
        found = embed_images(trained, fabric, dataset, source, bar)
    return found._replace(local=centered(torch.cat(maps), torch.tensor(local.mean)))


@contextmanager
def batch_features(
    local: LocalFusion, trained: TrainedModel, dataset: Dataset
) -> Generator[Callable[[Tensor], Tensor]]:
    """Yield a function that returns the local features (n, P, C) float16 of the batch that the model embedded last.

    It takes the rows (n,) of the batch in the dataset.

    Raises:
        UserError: see `kept_maps` and `keypoints_of`.
    """
    if local.run == SIFT:
        yield lambda rows: keypoints_of(dataset, rows).packed
        return
    mean = torch.tensor(local.mean)
    with kept_maps(trained.model) as maps:
        yield lambda _: centered(maps.pop(), mean)


def match_features(kind: str, queries: Tensor, gallery: Tensor) -> Match:
    """Return a function that scores how well images match, given the local features of queries and of a gallery."""
    if kind == SIFT:
        return match_keypoints(Keypoints.of(queries), Keypoints.of(gallery))
    return patch_matches(queries, gallery)


def require_one_process(kind: str, fabric: Ranks) -> None:
    """Raise an error if there are several processes.

    Raises:
        UserError: there are.
    """
    if fabric.world_size > 1:
        raise UserError(f"--with {kind}: runs in one process, got {fabric.world_size}; start it without ranks")


def _convolutions(module: nn.Module) -> int:
    return sum(isinstance(one, nn.Conv2d) for one in module.modules())
