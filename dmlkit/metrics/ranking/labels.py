"""Labels of queries and gallery as common numbers, also at several levels of a hierarchy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dmlkit.metrics.base import Array, Labeled, Labels, MetricConfig, Points, Ranking
from dmlkit.metrics.ranking.search import Lookup, Search


def check_sides(queries: Labeled, gallery: Labeled | None) -> None:
    """Check the types of queries and gallery, and that both have ids or neither."""
    sides: list[object] = [queries, gallery]  # of a caller without a type checker
    for side in sides:
        if not isinstance(side, Labeled | None):
            raise TypeError(f"expected queries and gallery as Labeled(embeddings, labels), got {type(side).__name__}")
    if (queries.ids is None) != (gallery is None or gallery.ids is None):
        raise ValueError("ids: give those of the queries and of the gallery, or neither")


@dataclass(frozen=True)
class Labeling:
    """Numbers of the labels of queries and gallery."""

    names: tuple[str, ...]  # of the levels, coarsest first; none without a hierarchy
    keys: tuple[tuple[Tensor, Tensor], ...]  # (N,) and (M,) int64 of each level; a single one without a hierarchy
    members: Tensor | None = None  # (C, L) bool, which labels each key stands for, if embeddings have several

    @classmethod
    def of(cls, labels: Labels, gallery: Labels | None, lengths: tuple[int, int | None]) -> "Labeling":
        """Return the numbers of the labels of ``lengths`` queries and gallery items."""
        if is_matrix(labels) or is_matrix(gallery):
            return cls._of_sets(labels, gallery, lengths)
        if not isinstance(labels, Mapping) and not isinstance(gallery, Mapping):
            return cls((), (as_keys(labels, gallery, "labels", lengths),))
        sides = [side for side in (labels, gallery) if side is not None]
        if not all(isinstance(side, Mapping) and list(side) == list(sides[0]) for side in sides):
            raise ValueError("labels and gallery_labels: expected the same levels on both sides, coarsest first")
        if not labels:
            raise ValueError("labels: expected at least one level, got none")
        levels: Any = labels
        others: Any = gallery or dict.fromkeys(levels)
        keys = tuple(as_keys(levels[name], others[name], f"labels of {name}", lengths) for name in levels)
        names = tuple(levels)
        for depth in range(1, len(names)):
            coarse, fine = (torch.cat(key) for key in keys[depth - 1 : depth + 1])
            if torch.stack([coarse, fine]).unique(dim=1).shape[1] > len(fine.unique()):
                raise ValueError(
                    f"labels: a {names[depth]} is in more than one {names[depth - 1]}; expected a hierarchy, e.g. with "
                    "labels such as genus/species"
                )
        return cls(names, keys)

    @classmethod
    def _of_sets(cls, labels: Labels, gallery: Labels | None, lengths: tuple[int, int | None]) -> "Labeling":
        sides = [torch.as_tensor(side) for side in (labels, gallery) if is_matrix(side)]
        if len(sides) < (1 if gallery is None else 2) or len({side.shape[1] for side in sides}) > 1:
            raise ValueError("labels and gallery_labels: expected (N, L) and (M, L) bool with the same L labels")
        for side, length in zip(sides, lengths, strict=False):
            if len(side) != length:
                raise ValueError(f"labels: expected one row per embedding, ({length}, L), got {tuple(side.shape)}")
            if not side.any(1).all():
                raise ValueError(f"labels: row {int((~side.any(1)).nonzero()[0])} has no label; expected at least one")
        members, keys = torch.cat([side.cpu() for side in sides]).unique(dim=0, return_inverse=True)
        return cls((), ((keys[: lengths[0]], keys[lengths[0] :]),), members)

    @property
    def classes(self) -> tuple[Tensor, Tensor]:
        """Numbers of the classes themselves, (N,) and (M,)."""
        return self.keys[-1]

    def needed(self, configs: Sequence[MetricConfig]) -> "Labeling":
        """Return the levels that metrics need: those below the coarsest one, or the classes alone."""
        for config in configs:
            if config.level is not None and config.level not in self.names:
                known = f"expected one of {', '.join(self.names)}" if self.names else "the labels have no levels"
                libraries = f", nor is it one of {', '.join(config.compat_values())}" if config.compat_values() else ""
                raise ValueError(f"{config.names()[0]}: unknown level {config.level!r}{libraries}; {known}")
        others = [config.names()[0] for config in configs if not config.searches and self.members is not None]
        if others:
            raise ValueError(f"{others[0]}: needs one label per embedding, got several; remove the metric")
        first = min((self._place(config) for config in configs), default=0)
        return replace(self, names=self.names[first:], keys=self.keys[first:])

    def _place(self, config: MetricConfig) -> int:
        if config.is_graded:
            return 0
        return len(self.keys) - 1 if config.level is None else self.names.index(config.level)

    def notes(self, configs: Sequence[MetricConfig]) -> Iterator[str]:
        """Yield a note for each level of a metric at which there is a single class."""
        for level in dict.fromkeys(config.level for config in configs if config.level is not None):
            if len(torch.cat(self.keys[self.names.index(level)]).unique()) == 1:
                yield f"{level}: all images are of one {level}, so that every neighbor is of the same one"

    def in_search(self, search: Search) -> Search:
        """Return a search for the items of the same class at the coarsest level, which knows the other levels."""
        if len(self.keys) == 1:
            return search
        queries, gallery = (torch.stack(side, 1).to(search.gallery.device) for side in zip(*self.keys, strict=True))
        gallery = gallery if len(gallery) else queries
        return replace(
            search,
            positives=Lookup.of(queries[:, 0].contiguous(), gallery[:, 0].contiguous()),
            levels=(queries, gallery),
        )

    def ranking(self, config: MetricConfig, ranking: Ranking) -> Ranking:
        """Return the ranking that a metric describes: of all levels, of its own, or of the classes themselves."""
        return ranking if config.is_graded else ranking.at_level(self._place(config) + 1)

    def points(self, config: MetricConfig, points: Points) -> Points:
        """Return the points that a metric describes, with the labels of its level."""
        if config.level is None:
            return points
        queries, gallery = self.keys[self._place(config)]
        targets = points.targets and replace(points.targets, labels=gallery, point_labels=queries)
        labels = queries.unique(return_inverse=True)[1].to(points.labels.device)
        return replace(points, labels=labels, targets=targets, shared={})


def is_matrix(labels: Labels | None) -> bool:
    """Return whether labels are a matrix (N, L) bool, of embeddings with several labels."""
    return getattr(labels, "ndim", 1) == 2 and "bool" in str(getattr(labels, "dtype", ""))


def as_keys(values: Array, others: Array | None, name: str, lengths: tuple[int, int | None]) -> tuple[Tensor, Tensor]:
    """Map the labels or ids of queries and gallery to common numbers, int64 in 0..C-1.

    Integers and strings are accepted; floats are not, because float32 represents only the integers up to 2^24.
    """
    import numpy as np

    sides: list[Any] = []
    for side, length in zip((values, others), lengths, strict=True):
        keys = side.detach().cpu().numpy() if isinstance(side, Tensor) else np.asarray(side)
        if side is None:
            keys = sides[0][:0]
        elif keys.shape != (length,):
            raise ValueError(f"{name}: expected one per embedding, shape ({length},), got {keys.shape}")
        elif keys.dtype.kind not in "iuUS":
            raise ValueError(f"{name}: expected integers or strings, got {keys.dtype}")
        sides.append(keys)
    if (sides[0].dtype.kind in "iu") != (sides[1].dtype.kind in "iu"):
        raise ValueError(
            f"{name}: the queries have {sides[0].dtype} and the gallery {sides[1].dtype}; expected the same type"
        )
    _, numbers = np.unique(np.concatenate(sides), return_inverse=True)
    return torch.from_numpy(numbers[: len(sides[0])]), torch.from_numpy(numbers[len(sides[0]) :])


def identities(queries: Labeled, gallery: Labeled | None, lengths: tuple[int, int | None]) -> tuple[Tensor, Tensor]:
    """Return what identifies queries and gallery, (N,) and (M,) int64: their ids, or the positions of all of them."""
    if queries.ids is not None and gallery is not None:
        return as_keys(queries.ids, gallery.ids, "ids", lengths)
    positions = torch.arange(lengths[0])
    return positions, positions if lengths[1] is None else torch.arange(lengths[1]) + lengths[0]
