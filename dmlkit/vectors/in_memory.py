"""Embedding of images in memory, with local features on request; `dmlkit.vectors.run` writes files."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.exchange import gather_lists, gather_rows
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.files.source import LOCAL
from dmlkit.loading.batches import Loader, evaluation_loader
from dmlkit.loading.inputs import Batch, refuse_nothing_read
from dmlkit.manifolds.base import check_points
from dmlkit.model import EmbeddingModel
from dmlkit.pooling import Pooling
from dmlkit.transforms.base import TransformConfig
from dmlkit.vectors.fusion import join
from dmlkit.vectors.manifest import LocalFusion
from dmlkit.vectors.progress_bar import EMBEDDING, Advance, Bar, no_bar
from dmlkit.vectors.store import BATCH_IMAGES
from dmlkit.vectors.trained import TrainedModel

UNSOUND = (
    "the training diverged, or the model does not fit such inputs; use another --checkpoint or run, or train with a "
    "lower optimizer.lr"
)
"""Advice if a model's output is not a point of its manifold."""
LEAST_CELLS = 64  # of a map: on the 5 x 5 cells of the last map of Lite0 at 160 pixels, matches say little
BLOCK = 256  # images whose patches are centered at once


class Embeddings(NamedTuple):
    """Points of the images that could be read."""

    points: Tensor  # (N, D) float32 on the CPU
    labels: Tensor  # (N,) int64
    indices: Tensor  # (N,) int64, into the dataset
    faults: list[str]  # one message per image that could not be read, in their order
    local: Tensor | None = None  # (N, P, C) float16, local features, if they were computed with the points


def embed_dataset(
    ranks: Ranks,
    model: EmbeddingModel,
    dataset: Dataset,
    transform: TransformConfig | None,
    *,
    indices: Sequence[int] | None = None,
    workers: int | None = None,
    advance: Advance = lambda _: None,
    keep: Callable[[Tensor], Tensor] | None = None,
) -> Embeddings:
    """Embed all images in float32, a share on each rank; every rank gets all points in the order of the dataset.

    A share is whole batches, and the batches are those of `FillJob`: with any number of ranks, and in a store, every
    embedding is the same to the bit.

    Args:
        model: model on the device; its mode is restored afterwards.
        keep: makes local features (n, P, C) of the maps of a batch, see `kept_maps`. Default: there are none.
    """
    wanted = range(len(dataset)) if indices is None else indices
    loader = share_loader(ranks, dataset, transform, wanted, workers)
    return embed_share(ranks, model, dataset, loader, len(wanted), advance, keep)


def share_loader(
    ranks: Ranks, dataset: Dataset, transform: TransformConfig | None, wanted: Sequence[int], workers: int | None
) -> Loader:
    """Return a loader of the images that this rank embeds of the wanted ones of a dataset."""
    share = _share(ranks, len(wanted))
    start = min(ranks.global_rank * share, len(wanted))
    return evaluation_loader(
        dataset,
        transform,
        indices=wanted[start : start + share],
        batch_size=BATCH_IMAGES,
        workers=workers,
        pin_memory=ranks.device.type == "cuda",
    )


def _share(ranks: Ranks, images: int) -> int:
    return BATCH_IMAGES * -(-images // (BATCH_IMAGES * ranks.world_size))


def embed_share(
    ranks: Ranks,
    model: EmbeddingModel,
    dataset: Dataset,
    loader: Loader,
    images: int,
    advance: Advance,
    keep: Callable[[Tensor], Tensor] | None = None,
) -> Embeddings:
    """Embed this rank's share of all ``images``, see `embed_dataset`, from its `share_loader`, new or used before."""
    model.check_takes(dataset)
    was_training = model.training
    if was_training:  # the modes of Lite0's 279 modules take 3 ms to set and restore, a photo 25
        model.eval()
    embeddings = embed_batches(model, dataset, loader, _share(ranks, images), ranks, advance, keep)
    if was_training:
        model.train()
    return embeddings


@torch.inference_mode()
def embed_batches(
    model: EmbeddingModel,
    dataset: Dataset,
    batches: Iterable[Batch],
    most: int,
    ranks: Ranks,
    advance: Advance,
    keep: Callable[[Tensor], Tensor] | None,
) -> Embeddings:
    """Embed batches of a dataset, ``most`` images or fewer, and check the points; ranks embed different ones."""
    if keep and ranks.world_size > 1:
        raise UserError(f"--with {LOCAL}: runs in one process, got {ranks.world_size}; start it without ranks")
    points, rows = torch.zeros(most, model.manifold.point_dim), torch.full((most,), -1)
    lost, local, filled = dict[int, str](), list[Tensor](), 0
    with kept_maps(model) if keep else nullcontext(list[Tensor]()) as maps:
        for batch in batches:
            lost |= batch.lost
            if len(batch.labels):
                into = slice(filled, filled + len(batch.labels))
                points[into] = model(batch.inputs.to(ranks.device)).float().cpu()
                rows[into] = batch.indices
                filled = into.stop
                local += [keep(maps.pop())] if keep else []
            advance((len(batch.labels) + len(batch.lost)) * ranks.world_size)
    if ranks.world_size > 1:
        points, rows = (gather_rows(ranks, tensor.to(ranks.device)).cpu() for tensor in (points, rows))
        lost = dict(gather_lists(ranks, list(lost.items())))
    is_filled = rows >= 0
    points, rows = points[is_filled], rows[is_filled]
    check_points(model.manifold, points, lambda row: str(dataset.paths[int(rows[row])]), UNSOUND)
    return Embeddings(
        points, dataset.labels[rows], rows, [lost[row] for row in sorted(lost)], torch.cat(local) if local else None
    )


def embed_images(
    trained: TrainedModel,
    ranks: Ranks,
    dataset: Dataset,
    source: str,
    bar: Bar = no_bar,
    known: Embeddings | None = None,
) -> Embeddings:
    """Embed the images of a dataset that are not known; those that cannot be read are reported in the result."""
    if trained.fusion is not None and known is None:
        parts = [embed_images(member, ranks, dataset, source, bar) for member in trained.members]
        return fused(trained, parts, range(len(dataset)))
    dataset.limit(trained.recipe.dataset.max_pixels)
    missing: Sequence[int] = range(len(dataset))
    if known is not None:
        missing = sorted({*missing}.difference(known.indices.tolist()))
        if not missing:
            return known
    with bar(EMBEDDING, len(missing)) as advance:
        is_few = len(missing) <= BATCH_IMAGES
        embeddings = embed_dataset(
            ranks,
            trained.model_of_few if is_few else trained.model,
            dataset,
            trained.recipe.transform,
            indices=missing,
            workers=0 if is_few else trained.recipe.training.workers,
            advance=advance,
            keep=features_by(trained.local),
        )
    if known is not None:
        rows = torch.cat([known.indices, embeddings.indices])
        order, points = rows.argsort(), torch.cat([known.points, embeddings.points])
        embeddings = Embeddings(points[order], dataset.labels[rows[order]], rows[order], embeddings.faults)
    refuse_nothing_read(len(embeddings.points), embeddings.faults, source)
    return embeddings


def fused(trained: TrainedModel, parts: Sequence[Embeddings], images: Sequence[int]) -> Embeddings:
    """Join the embeddings of images by the two models of a fusion; what only one of them could read is left out."""
    assert trained.fusion is not None
    first, second = parts
    rows = [torch.isin(one.indices, other.indices) for one, other in ((first, second), (second, first))]
    points = [part.points[mask].to(trained.device) for part, mask in zip(parts, rows, strict=True)]
    joined = join([member.manifold for member in trained.members], points, trained.fusion.share).cpu()
    lost: dict[int, str] = {}
    for part in (second, first):
        lost |= zip(sorted(set(images).difference(part.indices.tolist())), part.faults, strict=True)
    return Embeddings(joined, first.labels[rows[0]], first.indices[rows[0]], [lost[row] for row in sorted(lost)])


def features_of(
    local: LocalFusion | None, trained: TrainedModel, ranks: Ranks, dataset: Dataset, rows: Tensor, bar: Bar = no_bar
) -> Tensor:
    """Return the local features (N, P, C) float16 of images that can be read, given by their indices (N,).

    Those of one fusion can be compared; without one they are the cells of the maps, see `kept_maps`.
    """
    if not trained.samples.has_pixels:
        raise UserError(f"--with {LOCAL}: matches patches of images, got {trained.samples.name}s; leave it out")
    options: Any = {"indices": rows.tolist(), "keep": features_by(local) or nn.Identity()}
    options["workers"] = trained.recipe.training.workers if len(rows) > BLOCK else 0
    with bar("features of patches", len(rows)) as advance:
        features = embed_dataset(
            ranks, trained.model, dataset, trained.recipe.transform, **options, advance=advance
        ).local
    assert features is not None
    return features


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
