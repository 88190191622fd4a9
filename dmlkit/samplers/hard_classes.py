"""Batches of hard classes: those whose mean embeddings of the last epoch are nearest to each other."""

from collections.abc import Mapping
from itertools import chain, cycle

import torch
from pydantic import PositiveInt
from torch import Tensor

from dmlkit.errors import OptionError
from dmlkit.manifolds.base import Manifold
from dmlkit.samplers.class_balanced import ClassBalanced, Deck

BLOCK_ENTRIES = 2**24  # similarities of classes at once: 64 MB, and temporaries of distances


class HardClasses(ClassBalanced, name="hard_classes"):
    """m classes x n images: some classes are drawn, the others have the most similar mean embeddings (class mining).

    Sohn, NeurIPS 2016 (hard negative class mining), and Ge et al., ECCV 2018 (anchor neighbors). Of the m classes of a
    batch, ``drawn_classes`` come from a shuffled deck, so that over an epoch each class is drawn equally often, give or
    take one. In turn, each of them adds the class nearest to it that is not yet in the batch. A class that is near many
    others is shown more often than it is drawn.

    The mean of a class is that of its embeddings in the batches of the last epoch, as training computed them while the
    weights changed; no image is embedded again. A class without images in an epoch keeps its earlier mean. The first
    epoch has no means: its batches are those of `ClassBalanced`. A class without a mean is no neighbor, and the rest of
    its batch is drawn. Means are taken of features, as `Manifold.to_features` returns them, and compared by the
    similarity of the manifold.

    Means, sums and neighbors are part of the checkpoint, so that a resumed run has the same batches. Several ranks have
    the batches of one, unless rounding of the embeddings exchanges two neighbors.

    Raises:
        UserError: there are fewer than m classes, a class has fewer than n groups, or more classes are drawn than m.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line, labels = Euclidean(1), torch.tensor([0, 1, 2, 3])
        >>> sampler = HardClasses(labels, 0, classes_per_batch=2, images_per_class=1)
        >>> sampler.learn_from(torch.tensor([[0.0], [9.0], [1.0], [8.0]]), labels, line)
        >>> sampler.set_epoch(1, line)
        >>> all(set(batch) in ({0, 2}, {1, 3}) for batch in sampler.batches(1))
        True
    """

    takes_several_labels = False
    drawn_classes: PositiveInt = 1
    """Classes of a batch that are drawn; the others are those nearest to them. With m all are drawn, as in
    class_balanced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drawn_classes > self.classes_per_batch:
            raise OptionError(
                "sampler.drawn_classes",
                f"expected at most {self.classes_per_batch}, the classes of a batch, got {self.drawn_classes}",
            )
        self.epoch = 0
        self.neighbors: Tensor | None = None  # (C, m - 1) int64, nearest first; -1 where there is none
        self.means: Tensor | None = None  # (C, d) features; rows of classes that were never seen are zero
        self.sums: Tensor | None = None  # (C, d), of the current epoch
        self.counts = torch.zeros(len(self.images), dtype=torch.int64)  # (C,), of the current epoch
        self.seen = torch.zeros(len(self.images), dtype=torch.bool)  # (C,), classes that have a mean

    def set_epoch(self, epoch: int, manifold: Manifold) -> None:
        if epoch != self.epoch and self.sums is not None:
            means = self.sums / self.counts.clamp(min=1)[:, None]
            present = self.counts > 0
            self.means = means if self.means is None else means.where(present[:, None], self.means.to(means.device))
            self.seen = self.seen.to(present.device) | present
            self.neighbors = nearest_classes(self.means, self.seen, self.classes_per_batch - 1, manifold).cpu()
            self.sums, self.counts = None, torch.zeros_like(self.counts)
        self.epoch = epoch

    @torch.no_grad()
    def learn_from(self, embeddings: Tensor, labels: Tensor, manifold: Manifold) -> None:
        features = manifold.to_features(embeddings.detach().float())
        sums = features.new_zeros(len(self.images), features.shape[1]) if self.sums is None else self.sums
        self.sums = add_rows(sums.to(features.device), labels, features)
        self.counts = add_rows(self.counts.to(labels.device), labels, torch.ones_like(labels))

    def state(self) -> dict[str, Tensor]:
        optional = {"neighbors": self.neighbors, "means": self.means, "sums": self.sums}
        required = {"epoch": torch.tensor(self.epoch), "counts": self.counts, "seen": self.seen}
        return required | {name: value for name, value in optional.items() if value is not None}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if state["counts"].shape != self.counts.shape:
            raise ValueError(f"the sampler has {len(state['counts'])} classes, expected {len(self.counts)}")
        self.epoch, self.counts, self.seen = int(state["epoch"]), state["counts"], state["seen"]
        self.neighbors, self.means, self.sums = (state.get(name) for name in ("neighbors", "means", "sums"))

    def classes_of_batch(self, classes: Deck) -> list[int]:
        if self.neighbors is None:
            return super().classes_of_batch(classes)
        chosen = classes.deal(self.drawn_classes)
        dealt = iter(lambda: classes.deal(1)[0], None)  # where too few classes have a mean
        lists = [chain((label for label in self.neighbors[seed].tolist() if label >= 0), dealt) for seed in chosen]
        for candidates in cycle(lists):
            if len(chosen) == self.classes_per_batch:
                break
            chosen.append(next(label for label in candidates if label not in chosen))
        return chosen


def add_rows(sums: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Add rows (B, ...) to the sums (C, ...) of their labels, in an order that does not vary, and return the sums."""
    if sums.is_cuda:  # adds in any order with index_add_, in that of the rows with index_put_; the CPU has it reversed
        return sums.index_put_((labels,), rows, accumulate=True)
    return sums.index_add_(0, labels, rows)


@torch.no_grad()
def nearest_classes(means: Tensor, seen: Tensor, count: int, manifold: Manifold) -> Tensor:
    """Return the classes most similar to each, (C, count) int64, nearest first; -1 where there are fewer.

    Args:
        means: (C, d) features.
        seen: (C,) bool, the classes that have a mean.
    """
    points = manifold.from_features(means)
    neighbors: list[Tensor] = []
    for rows in torch.arange(len(means), device=means.device).split(max(1, BLOCK_ENTRIES // len(means))):
        similarity = manifold.similarity(points[rows], points).masked_fill(~seen, -torch.inf)
        similarity[torch.arange(len(rows), device=rows.device), rows] = -torch.inf
        scores, nearest = similarity.topk(min(count, len(means)), dim=1)
        neighbors.append(nearest.masked_fill((scores == -torch.inf) | ~seen[rows, None], -1))
    return torch.cat(neighbors)
