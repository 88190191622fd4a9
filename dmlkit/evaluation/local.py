"""Local scores: matches of patches of a run's own network or of keypoints, and their weight on validation classes."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.embedding.in_memory import Embeddings, embed_dataset
from dmlkit.embedding.manifest import Fusion
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.stored import split_embeddings
from dmlkit.embedding.trained import TrainedModel, load_model
from dmlkit.errors import UserError
from dmlkit.evaluation.fusion import PairOfModels
from dmlkit.evaluation.sift import keypoints_of, match_keypoints
from dmlkit.files.source import LOCAL, SIFT
from dmlkit.loading.cache import images_of_split
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.ranking.local import LocalScores, Match, patch_matches, score_candidates
from dmlkit.metrics.scoring import score_retrieval
from dmlkit.pooling import Pooling
from dmlkit.run_folder.folder import CheckpointName, RunFolder

LEAST_CELLS = 64  # of a map: on the 5 x 5 cells of the last map of Lite0 at 160 pixels, matches say little


def choose_local(
    run: Path,
    *,
    kind: str = LOCAL,
    checkpoint: CheckpointName | None = None,
    fabric: Ranks,
    bar: Bar = no_bar,
) -> Fusion:
    """Choose the weight of local scores on the validation classes of a run, as `choose_fusion` does.

    The pairs are those of each validation image and its nearest candidates.

    Args:
        run: the run.
        kind: `LOCAL` for patches of its network, `SIFT` for keypoints, which need no training.
        checkpoint: its checkpoint. Default: best, otherwise last.
        fabric: device.
        bar: shows each step.

    Raises:
        UserError: the run has no validation classes, or see `patches_of` and `keypoints_of`.
    """
    folder = RunFolder(run)
    folder.check_unseen("validation")
    trained = load_model(folder, fabric, checkpoint)
    trained.recipe.dataset.require_one_label(f"--with {kind}")
    dataset = images_of_split(trained.recipe.dataset, "validation")
    found = split_embeddings(folder, trained, fabric, dataset, "validation", bar=bar)
    matches = _matches_of(kind, trained, fabric, dataset, found, bar)
    space, everything = deepcopy(trained.manifold).cpu(), torch.ones(len(found.points), dtype=torch.bool)
    with bar("matching images", len(found.points)) as advance, torch.no_grad():
        match = matches(everything, everything)
        local = score_candidates(space, (found.points, found.points), match, advance)
        weights, share, alone, together = PairOfScores(found, space, local).choice()
    return Fusion(
        run=kind,
        checkpoint=trained.checkpoint,
        fingerprint=trained.fingerprint,
        share=share,
        weights=weights,
        alone=alone,
        together=together,
    )


class PairOfScores(PairOfModels):
    """Similarities and local scores of images and their candidates.

    Args:
        found: the images.
        manifold: their geometry.
        local: local scores among each other.
    """

    def __init__(self, found: Embeddings, manifold: Manifold, local: LocalScores) -> None:
        self.points, self.labels, self.manifolds, self.local = [found.points], found.labels, [manifold], local
        rows = torch.arange(len(found.points))[:, None].expand_as(local.candidates)
        others = rows != local.candidates
        first, second = rows[others], local.candidates[others]
        self.classes = found.labels.numpy()[np.stack([first.numpy(), second.numpy()], axis=1)]
        similarity = [
            manifold.paired_similarity(found.points[one].double(), found.points[other].double())
            for one, other in zip(first.split(2**16), second.split(2**16), strict=True)
        ]
        self.scores = [torch.cat(similarity).numpy(), local.scores[others].double().numpy()]

    def map_at_r(self, share: float, asked: Tensor) -> Tensor:
        """Return the map@r of those of the images asked (N,) bool that have others of their class."""
        points, rows = self.points[0], torch.arange(len(self.labels))
        local = LocalScores(self.local.candidates[asked], self.local.scores[asked], share)
        scores = score_retrieval(
            *(points[asked], self.labels[asked], points, self.labels),
            manifold=self.manifolds[0],
            metrics=["map@r"],
            ids=rows[asked],
            gallery_ids=rows,
            rescore=local,
        )
        return scores.per_query["map@r"]


def patches_of(trained: TrainedModel, fabric: Ranks, dataset: Dataset, found: Embeddings, bar: Bar = no_bar) -> Tensor:
    """Return the patch features of images: unit vectors (N, P, C), float16, less their mean over all patches.

    They are cells of the last map of a block of convolutions with at least `LEAST_CELLS` cells, or the tokens of a
    transformer.

    Args:
        trained: the model.
        fabric: the device; one process.
        dataset: the images.
        found: their embeddings, which say which of them can be read.
        bar: shows the images.

    Raises:
        UserError: the samples are no images, the network has no such map, or there are several processes.
    """
    if not trained.samples.has_pixels:
        raise UserError(f"--with {LOCAL}: matches patches of images, got {trained.samples.name}s; leave it out")
    if fabric.world_size > 1:
        raise UserError(f"--with {LOCAL}: runs in one process, got {fabric.world_size}; start it without ranks")
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

    network = trained.model.backbone
    blocks = [one for one in network.modules() if isinstance(one, Pooling) or _convolutions(one) > 1]
    handles = [one.register_forward_hook(keep) for one in blocks if one is not network]
    handles.append(network.register_forward_hook(end))
    try:
        with bar("features of patches", len(found.indices)) as advance:
            embed_dataset(
                fabric,
                trained.model,
                dataset,
                trained.recipe.transform,
                indices=found.indices.tolist(),
                workers=trained.recipe.training.workers,
                advance=advance,
            )
    finally:
        for handle in handles:
            handle.remove()
    patches = torch.cat(parts)
    mean = torch.stack([part.float().mean((0, 1)) for part in patches.split(256)]).mean(0)
    return torch.cat([nn.functional.normalize(part.float() - mean, dim=-1).half() for part in patches.split(256)])


def local_scores(
    fusion: Fusion, trained: TrainedModel, fabric: Ranks, dataset: Dataset, found: Embeddings, bar: Bar = no_bar
) -> Callable[[Tensor, Tensor], LocalScores]:
    """Return a function of the rows (N,) bool of queries and gallery, which scores the candidates of the queries.

    Args:
        fusion: weight of the local scores.
        trained, fabric, dataset, found, bar: see `patches_of`.
    """
    matches, points = _matches_of(fusion.run, trained, fabric, dataset, found, bar), found.points
    space = deepcopy(trained.manifold).cpu()

    def scored(query: Tensor, gallery: Tensor) -> LocalScores:
        sides = points[query], points[gallery]
        with bar("matching images", int(query.sum())) as advance, torch.no_grad():
            return score_candidates(space, sides, matches(query, gallery), advance)._replace(share=fusion.share)

    return scored


def _matches_of(
    kind: str, trained: TrainedModel, fabric: Ranks, dataset: Dataset, found: Embeddings, bar: Bar
) -> Callable[[Tensor, Tensor], Match]:
    """Return a function of the rows (N,) bool of queries and gallery, which gives the scores of pairs of them."""
    if kind == SIFT:
        if fabric.world_size > 1:
            raise UserError(f"--with {SIFT}: runs in one process, got {fabric.world_size}; start it without ranks")
        keypoints = keypoints_of(dataset, found, bar)
        return lambda query, gallery: match_keypoints(keypoints.chosen(query), keypoints.chosen(gallery))
    patches = patches_of(trained, fabric, dataset, found, bar)
    return lambda query, gallery: patch_matches(patches[query], patches[gallery])


def _convolutions(module: nn.Module) -> int:
    return sum(isinstance(one, nn.Conv2d) for one in module.modules())
