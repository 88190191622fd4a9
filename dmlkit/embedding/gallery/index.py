"""Approximate index of a gallery, tuned until it reaches the requested recall by measurement."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from math import ceil, isqrt
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from dmlkit.embedding.gallery.change import changing, record_content
from dmlkit.embedding.gallery.files import MANIFEST, TABLE_FOLDER, ApproximateIndex, IndexKind
from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.gallery.manifest import GalleryManifest, read_gallery_manifest
from dmlkit.embedding.gallery.table import reading
from dmlkit.embedding.search import CACHED_ELEMENTS, MARGIN, Neighbors, StoredGallery, StoredPoints
from dmlkit.errors import UserError
from dmlkit.files.escape import command_word

FEWEST = 256  # images: LanceDB learns as many codes a coordinate pair
QUERIES = 1000  # images that the recall is measured on
NEAREST = 10  # of each
MOST_CANDIDATES = 64  # a neighbor
MORE = 1.25  # times as many candidates; each costs as much as finding it
FIRST_PROBES = 1
SURE = 1.645  # standard errors: one-sided 95 %


@dataclass(frozen=True)
class Indexed:
    """Measurements of an index.

    Args:
        index: the index as stored.
        queries: number of images used as queries.
        exact_milliseconds: time of one query without the index.
        milliseconds: time of one query with it.
        build_seconds: time of building it.
    """

    index: ApproximateIndex
    queries: int
    exact_milliseconds: float
    milliseconds: float
    build_seconds: float
    bytes_per_image: float = 0.0
    """Size of the index on the disk."""
    full_bytes: int = 0
    """Size of a whole vector, in float32."""


@dataclass(frozen=True)
class Tried:
    """Result of a search through an index."""

    index: ApproximateIndex
    seconds: float
    sure: float
    """Recall that is reached with 95 % confidence, so that other queries find no less than requested."""


def index_gallery(path: Path, kind: IndexKind, recall: float) -> Indexed:
    """Build an index, which replaces an earlier one, and search it as far as the recall requires.

    The queries are random images of the gallery, each searched without itself.

    Args:
        kind: one of `IndexKind`, see LanceDB.
        recall: share of the 10 nearest that must be found, on average and with 95 % confidence.

    Raises:
        UserError: there are too few images, or the recall is no share or not reached; then the gallery is unchanged.
    """
    if not 0 < recall <= 1:
        raise UserError(f"--recall {recall}: expected a share of the nearest, above 0 and at most 1")
    gallery = GalleryFolder(path)
    if len(gallery) < FEWEST:
        raise UserError(
            f"{path}: {len(gallery)} images are too few for an index, which needs {FEWEST}; search is exact, and fast"
        )
    with changing(path) as table:
        gallery = GalleryFolder(path)  # now: another process may have migrated it meanwhile
        before: int = table.version
        try:
            folders, started = {*_index_folders(path)}, perf_counter()
            name = _build(table, gallery, kind)
            seconds = perf_counter() - started
            new = {*_index_folders(path)} - folders
            size = sum(file.stat().st_size for folder in new for file in folder.iterdir())
            first = ApproximateIndex(name=name, kind=kind, nprobes=FIRST_PROBES, candidates=1, recall=0)
            found = _measured(GalleryFolder(path), first, recall, seconds)
            manifest = read_gallery_manifest(path).model_copy(update={"approximate": found.index})
            manifest.write(path / MANIFEST)
        except BaseException:
            if table.version != before:
                table.restore(before)
                record_content(path)
            raise
    width: int = table.schema.field(column_and_metric(gallery.manifest)[0]).type.list_size
    return replace(found, bytes_per_image=size / len(gallery), full_bytes=4 * width)


def _index_folders(path: Path) -> Iterator[Path]:
    return (path / TABLE_FOLDER / "_indices").glob("*")


def partitions(images: int) -> int:
    """Return the number of parts of an index: as many as each has images, if LanceDB can learn a part from these."""
    return max(1, min(isqrt(images), images // FEWEST))


def _build(table: Any, gallery: GalleryFolder, kind: IndexKind) -> str:
    """Build an index with a new name, which distinguishes it from the one before."""
    from lancedb.index import HnswSq, IvfPq, IvfRq, IvfSq

    column, metric = column_and_metric(gallery.manifest)
    width: int = table.schema.field(column).type.list_size
    options: Any = {"distance_type": metric}
    parts = options | {"num_partitions": partitions(len(gallery))}
    config: Any
    match kind:
        case "ivf_pq":
            # of 26 candidates among 1 000 000 x 128, 4 bits for each coordinate and 8 for each two find 98.2 and 98.4 %
            # of the 10 nearest; an index of 4 bits is built in a fifth of the time, but only of an even width
            config = IvfPq(**parts, num_sub_vectors=width, num_bits=8 if width % 2 else 4)
        case "ivf_hnsw_sq":
            config = HnswSq(**options)
        case "ivf_sq":
            config = IvfSq(**parts)
        case "ivf_rq":
            if width % 8:
                raise UserError(
                    f"--precision binary: the search vectors of {gallery.path} have {width} coordinates; expected a "
                    "multiple of 8; use --precision int8"
                )
            config = IvfRq(**parts)
    name = f"approximate-{uuid4().hex[:12]}"
    for old in table.list_indices():
        table.drop_index(old.name)
    table.create_index(column, config=config, name=name, wait_timeout=timedelta(days=1))
    return name


def _measured(gallery: GalleryFolder, index: ApproximateIndex, recall: float, seconds: float) -> Indexed:
    """Search further until the recall is reached, each time where that helps more."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randperm(len(gallery), generator=generator)[:QUERIES].sort().values
    points = gallery.points_at(queries)
    stored = StoredGallery(gallery.manifold, gallery)
    nearest = min(NEAREST, len(gallery) - 1)
    started = perf_counter()
    worst = stored.search(points, nearest + 1).without(queries).similarities[:, -1:]
    exact = perf_counter() - started
    searcher = ApproximateGallery(gallery, index)

    def tried(one: ApproximateIndex) -> Tried:
        searcher.index = one
        started = perf_counter()
        found = searcher.search(points, nearest + 1).without(queries)
        shares = (found.similarities >= worst).double().mean(1)  # of equally near ones any will do
        sure = shares.mean() - SURE * shares.std() / len(shares) ** 0.5
        return Tried(one.model_copy(update={"recall": shares.mean().item()}), perf_counter() - started, sure.item())

    best = tried(index)
    while best.sure < recall:
        further = [tried(one) for one in _further(best.index, partitions(len(gallery)))]
        if not further:
            raise UserError(
                f"{gallery.path}: {best.index.value} finds {best.index.recall:.4f} of the {nearest} nearest at most "
                f"({best.sure:.4f} with 95 % confidence), expected {recall}; no index was kept: try another --kind, or "
                "a lower --recall"
            )
        best = max(further, key=lambda one: (one.sure, -one.seconds))
    milliseconds = [1e3 * one / len(queries) for one in (exact, best.seconds)]
    return Indexed(best.index, len(queries), *milliseconds, build_seconds=seconds)


def _further(index: ApproximateIndex, partitions: int) -> Iterator[ApproximateIndex]:
    if index.nprobes < partitions:
        yield index.model_copy(update={"nprobes": min(2 * index.nprobes, partitions)})
    if index.candidates < MOST_CANDIDATES:
        yield index.model_copy(update={"candidates": MORE * index.candidates})


ELEMENTS = 2**22  # float64 coordinates of candidates at once: 32 MB
AT_ONCE = 96  # queries, a fifth faster than 64; of 320 LanceDB 0.40 took 4 times as long, and twice did not come back


class ApproximateGallery:
    """Gallery with an approximate index.

    Args:
        points: the points of the gallery, if they are in memory too: the candidates are read from there.
    """

    def __init__(self, folder: GalleryFolder, index: ApproximateIndex, points: StoredPoints | None = None) -> None:
        self.folder, self.index, self.points = folder, index, points or folder
        self.manifold = folder.manifold
        self.exact = StoredGallery(self.manifold, self.points)
        self.column, self.metric = column_and_metric(folder.manifest)
        self.advice = f"build it again with dmlkit gallery index {command_word(folder.path)}, or search with --exact"
        addresses = folder.row_addresses()
        self.order = np.argsort(addresses)  # compacting may put later rows before earlier ones
        self.addresses = addresses[self.order]

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
        candidates = _side_by_side([self._candidates(block, length) for block in queries.split(AT_ONCE)])
        once, places = candidates.clamp(min=0).unique(return_inverse=True)
        points, similarity = self.points.points_at(once), torch.empty(candidates.shape, dtype=torch.float64)
        rows = max(1, CACHED_ELEMENTS // (candidates.shape[1] * queries.shape[1]))
        for own in torch.arange(len(queries)).split(rows):
            similarity[own] = self.manifold.paired_similarity(queries[own, None].double(), points[places[own]].double())
        similarity[candidates < 0] = -torch.inf
        order = similarity.argsort(dim=1, descending=True, stable=True)[:, :k]
        found = Neighbors(similarity.gather(1, order).to(queries.dtype), candidates.gather(1, order))
        few = (found.indices < 0).any(dim=1)  # the parts of the index that were looked at hold fewer than k
        if few.any():
            exact = self.exact.search(queries[few], k)
            found.similarities[few], found.indices[few] = exact.similarities, exact.indices
        return found

    def _candidates(self, queries: Tensor, length: int) -> Tensor:
        """Return rows (Q, length) in ascending order, padded with -1 in front."""
        vectors = queries if self.column == "point" else self.manifold.index_vectors(queries.double(), "query")
        search: Any = self.folder.table.search(vectors.float().numpy(), vector_column_name=self.column)
        search = search.distance_type(self.metric).nprobes(self.index.nprobes).limit(length).with_row_id(True)
        with reading(self.folder.path, "search the index of", self.advice):
            table = search.select(["_distance"]).to_arrow()
            addresses = table["_rowid"].to_numpy()
            places = np.searchsorted(self.addresses, addresses).clip(max=len(self.addresses) - 1)
            if (self.addresses[places] != addresses).any():
                raise ValueError("it names rows that are not there")
            # a search with one query does not number it
            asked = table["query_index"].to_numpy() if len(queries) > 1 else np.zeros(len(table), np.int64)
        rows = self.order[places]
        order = np.lexsort((rows, asked))
        rows, asked = rows[order], asked[order]
        counts = np.bincount(asked, minlength=len(queries))
        candidates = np.full((len(queries), max(length, counts.max(initial=0))), -1)
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        candidates[asked, candidates.shape[1] - counts[asked] + places] = rows
        return torch.from_numpy(candidates)


def _side_by_side(blocks: list[Tensor]) -> Tensor:
    """Join the candidates of all blocks of queries, padded with -1 in front to the widest block."""
    width = max(block.shape[1] for block in blocks)
    return torch.cat([torch.nn.functional.pad(block, (width - block.shape[1], 0), value=-1) for block in blocks])


def column_and_metric(manifest: GalleryManifest) -> tuple[str, str]:
    """Return the column to index, and LanceDB's distance that orders it as the similarity does.

    Straight distances are preferred: by products LanceDB leaves parts of an index empty, and others too full.
    """
    match manifest.index.form:
        case "unit" | "unit_space":
            return "vector", "l2"
        case "euclidean_lift":
            return "point", "l2"
        case "as_is" if manifest.similarity != "dot":  # unit vectors
            return "vector", "l2"
        case _:
            return "vector", "dot"
