"""Approximate index of a gallery by FAISS, tuned until it reaches the requested recall by measurement.

The index has the number of each image, which is that of the image in all versions: removing images or restoring a
version needs no other index, and images that are not in it are compared exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, isqrt
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.files.arrays import Values
from dmlkit.files.atomic import atomic_write
from dmlkit.gallery.files import MANIFEST, ApproximateIndex, IndexKind, index_file, outside_of, read_index
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.manifest import changing
from dmlkit.nearest.search import CACHED_ELEMENTS, MARGIN, Neighbors, StoredGallery, StoredPoints

FEWEST = 256  # images: a code of 8 bits has as many values
QUERIES = 1000  # images that the recall is measured on
NEAREST = 10  # of each
MOST_CANDIDATES = 64  # a neighbor
MORE = 1.25  # times as many candidates; each costs as much as finding it
SURE = 1.645  # standard errors: one-sided 95 %
TRAINING = 100_000  # images that the codes are learned from at most
ROWS = 8192  # added at once
GRAPH = 16  # nodes that a search of a graph keeps, per part that a search of lists visits


@dataclass(frozen=True)
class Indexed:
    """Measurements of an index."""

    index: ApproximateIndex
    queries: int  # images that are searched with
    exact_milliseconds: float  # of a query without the index
    milliseconds: float  # of a query with it
    build_seconds: float
    bytes_per_image: float  # on the disk
    full_bytes: int  # of a whole vector, in float32


def index_gallery(path: Path, kind: IndexKind, recall: float) -> Indexed:
    """Build an index, which replaces an earlier one, and search it as far as the recall requires.

    The queries are random images of the gallery, each searched without itself.

    Args:
        recall: share of the 10 nearest that must be found, on average and with 95 % confidence.
    """
    if not 0 < recall <= 1:
        raise UserError(f"--recall {recall}: expected a share of the nearest, above 0 and at most 1")
    with changing(path) as manifest:
        gallery = GalleryFolder(path)
        if len(gallery) < FEWEST:
            raise UserError(
                f"{path}: {len(gallery)} images are too few for an index, which needs {FEWEST}; search is exact, and "
                "fast"
            )
        started = perf_counter()
        index = _build(gallery, kind)
        seconds = perf_counter() - started
        name = uuid4().hex[:12]
        first = ApproximateIndex(name=name, kind=kind, images=len(gallery), nprobes=1, candidates=1, recall=0)
        measured = _measured(gallery, first, index, recall)
        size = _write(path, name, index)
        manifest.model_copy(update={"approximate": measured[0]}).write(path / MANIFEST)
        if manifest.approximate is not None:
            index_file(path, manifest.approximate.name).unlink(missing_ok=True)
    return Indexed(*measured, build_seconds=seconds, bytes_per_image=size / len(gallery), full_bytes=4 * index.d)


def extend_index(gallery: GalleryFolder, known: ApproximateIndex) -> ApproximateIndex:
    """Write the index of a gallery with those images that it lacks, if there are any, and return its description."""
    searcher = ApproximateGallery(gallery, known)
    if not len(searcher.outside):
        return known
    _add(searcher.faiss, gallery, searcher.outside)
    name = uuid4().hex[:12]
    _write(gallery.path, name, searcher.faiss)
    return known.model_copy(update={"name": name, "images": searcher.faiss.ntotal})


def _write(path: Path, name: str, index: Any) -> int:
    """Write an index, and return its size in bytes."""
    import faiss

    with atomic_write(index_file(path, name)) as partial:
        faiss.write_index(index, str(partial))
        return partial.stat().st_size


def partitions(images: int) -> int:
    """Return the number of parts of an index: as many as each has images, if a part can be learned from these."""
    return max(1, min(isqrt(images), images // FEWEST))


def _drawn(gallery: GalleryFolder, limit: int) -> Tensor:
    """Return random rows of a gallery, always the same."""
    return torch.randperm(len(gallery), generator=torch.Generator().manual_seed(0))[:limit].sort().values


def _build(gallery: GalleryFolder, kind: IndexKind) -> Any:
    """Build an index of all images by their numbers."""
    import faiss

    width = _vectors(gallery, torch.zeros(1, dtype=torch.int64)).shape[1]
    lists = f"IVF{partitions(len(gallery))}"
    match kind:
        case "ivf_pq":  # codes of a byte for each two numbers
            factory = f"{lists},PQ{width // 2 if width % 2 == 0 else width}x8"
        case "ivf_hnsw_sq":
            factory = "HNSW32_SQ8"
        case "int8":
            factory = f"{lists},SQ8"
        case "binary":
            factory = f"{lists},RaBitQ"
    form, similarity = gallery.manifest.index.form, gallery.manifest.similarity
    # by products some lists of an index stay empty, and others get too long
    is_straight = form in ("unit", "unit_space", "euclidean_lift") or (form == "as_is" and similarity != "dot")
    metric = faiss.METRIC_L2 if is_straight else faiss.METRIC_INNER_PRODUCT
    trained: Any = faiss.index_factory(width, factory, metric)
    if kind == "ivf_pq":
        trained.do_polysemous_training = False  # it orders codes for a filter that no search uses: 2 s per byte
        trained.pq.cp.min_points_per_centroid = 1  # FAISS asks for more images on the screen; the recall is measured
    index = faiss.IndexIDMap(trained)
    faiss.omp_set_num_threads(torch.get_num_threads())
    index.train(_vectors(gallery, _drawn(gallery, TRAINING)))
    _add(index, gallery, torch.arange(len(gallery)))
    return index


def _add(index: Any, gallery: GalleryFolder, rows: Tensor) -> None:
    numbers = gallery.numbers
    for block in rows.split(ROWS):
        index.add_with_ids(_vectors(gallery, block), numbers[block.numpy()])


def _vectors(gallery: GalleryFolder, rows: Tensor) -> Values:
    points = gallery.points_at(rows)
    if gallery.manifest.index.form == "euclidean_lift":  # near points are near: no product is needed
        return points.numpy()
    return gallery.manifold.index_vectors(points.double(), "gallery").float().numpy()


def _measured(
    gallery: GalleryFolder, index: ApproximateIndex, built: Any, recall: float
) -> tuple[ApproximateIndex, int, float, float]:
    """Search further until the recall is reached, each time where that helps more; return the start of `Indexed`."""
    queries, nearest = _drawn(gallery, QUERIES), min(NEAREST, len(gallery) - 1)
    points, searcher = gallery.points_at(queries), ApproximateGallery(gallery, index, built=built)
    started = perf_counter()
    worst = searcher.exact.search(points, nearest + 1).without(queries).similarities[:, -1:]
    exact = perf_counter() - started

    def tried(setting: ApproximateIndex) -> tuple[float, float, ApproximateIndex]:
        """Search through an index; return the recall that holds with 95 % confidence, and -1 times the seconds."""
        searcher.index = setting
        started = perf_counter()
        neighbors = searcher.search(points, nearest + 1).without(queries)
        shares = (neighbors.similarities >= worst).double().mean(1)  # of equally near ones any will do
        sure = shares.mean() - SURE * shares.std() / len(shares) ** 0.5
        return sure.item(), started - perf_counter(), setting.model_copy(update={"recall": shares.mean().item()})

    sure, negative_seconds, best = tried(index)
    while sure < recall:
        further = [tried(setting) for setting in _further(best, partitions(len(gallery)))]
        if not further:
            raise UserError(
                f"{gallery.path}: {best.kind} finds {best.recall:.4f} of the {nearest} nearest at most "
                f"({sure:.4f} with 95 % confidence), expected {recall}; nothing was changed: try another --method "
                "or a lower --recall"
            )
        sure, negative_seconds, best = max(further, key=lambda trial: trial[:2])
    return best, len(queries), 1e3 * exact / len(queries), -1e3 * negative_seconds / len(queries)


def _further(index: ApproximateIndex, partitions: int) -> Iterator[ApproximateIndex]:
    if index.nprobes < partitions:
        yield index.model_copy(update={"nprobes": min(2 * index.nprobes, partitions)})
    if index.candidates < MOST_CANDIDATES:
        yield index.model_copy(update={"candidates": MORE * index.candidates})


ELEMENTS = 2**22  # float64 coordinates of candidates at once: 32 MB


class ApproximateGallery:
    """Gallery with an approximate index.

    Args:
        points: the points of the gallery, if they are in memory too: the candidates are read from there.
        built: the index, if it is not in its file yet.
    """

    def __init__(
        self, folder: GalleryFolder, index: ApproximateIndex, points: StoredPoints | None = None, *, built: Any = None
    ) -> None:
        self.folder, self.index, self.points = folder, index, points or folder
        self.manifold = folder.manifold
        self.exact = StoredGallery(self.manifold, self.points)
        self.faiss = read_index(folder.path, index) if built is None else built
        self.outside = torch.from_numpy(outside_of(self.faiss, folder.numbers))
        self.order = np.argsort(folder.numbers)

    def search(self, queries: Tensor, k: int) -> Neighbors:
        """Return approximately the k most similar points of each query (Q, D), in their exact order.

        The search is exact if k is so large that every point would be a candidate.
        """
        length = ceil(self.index.candidates * (k + MARGIN))
        if length >= len(self.folder):
            return self.exact.search(queries, k)
        rows = max(1, ELEMENTS // (length * queries.shape[1]))
        return Neighbors.joined((self._search(block, k, length) for block in queries.split(rows)), k)

    def _search(self, queries: Tensor, k: int, length: int) -> Neighbors:
        candidates = self._candidates(queries, length)
        distinct, inverse = candidates.clamp(min=0).unique(return_inverse=True)
        points, similarity = self.points.points_at(distinct), torch.empty(candidates.shape, dtype=torch.float64)
        rows = max(1, CACHED_ELEMENTS // (candidates.shape[1] * queries.shape[1]))
        for block in torch.arange(len(queries)).split(rows):
            similarity[block] = self.manifold.paired_similarity(
                queries[block, None].double(), points[inverse[block]].double()
            )
        similarity[candidates < 0] = -torch.inf
        order = similarity.argsort(dim=1, descending=True, stable=True)[:, :k]
        neighbors = Neighbors(similarity.gather(1, order).to(queries.dtype), candidates.gather(1, order))
        few = (neighbors.indices < 0).any(dim=1)  # the parts of the index that were looked at hold fewer than k
        if few.any():
            exact = self.exact.search(queries[few], k)
            neighbors.similarities[few], neighbors.indices[few] = exact.similarities, exact.indices
        return neighbors

    def _candidates(self, queries: Tensor, length: int) -> Tensor:
        """Return rows (Q, C) in ascending order, padded with -1 in front: those of the index, and all outside of it."""
        import faiss

        is_lifted = self.folder.manifest.index.form == "euclidean_lift"
        vectors = queries if is_lifted else self.manifold.index_vectors(queries.double(), "query")
        inner: Any = faiss.downcast_index(self.faiss.index)
        if self.index.kind == "ivf_hnsw_sq":
            inner.hnsw.efSearch = max(length, GRAPH * self.index.nprobes)
        else:
            inner.nprobe = self.index.nprobes
        _, numbers = self.faiss.search(vectors.float().numpy(), length)
        known = self.folder.numbers
        positions = np.searchsorted(known, numbers, sorter=self.order).clip(max=len(known) - 1)
        rows = self.order[positions]
        rows[known[rows] != numbers] = -1  # removed, or fewer than asked for
        outside = np.broadcast_to(self.outside.numpy(), (len(rows), len(self.outside)))
        return torch.from_numpy(np.sort(np.concatenate([rows, outside], axis=1), axis=1))
