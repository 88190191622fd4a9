"""Find what is like some images: what ``dmlkit search`` does."""

from pathlib import Path

import torch

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.gallery.index import ApproximateGallery
from dmlkit.embedding.gallery.manifest import holds_gallery
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.questions.answers import Answers
from dmlkit.embedding.questions.queries import Queries, queries_of
from dmlkit.embedding.search import Neighbors, StoredGallery
from dmlkit.embedding.searchable import Searchable
from dmlkit.errors import UserError


def search(
    source: Path,
    queries: Path,
    *,
    k: int = 10,
    exact: bool = False,
    run: Path | None = None,
    device: str = "auto",
    bar: Bar = no_bar,
) -> Answers:
    """The k nearest of each query, in bounded memory: exactly, unless a gallery has an approximate index.

    Args:
        source: a folder of embeddings, or a gallery.
        queries: an image, a folder of images, or a folder of embeddings.
        k: neighbours of a query; all, where there are fewer.
        exact: also of a gallery that has an index.
        run: embeds images; by default the run of ``source``.
        device: where images are embedded, see `start_fabric`.
        bar: shows each step.

    Raises:
        UserError: k is below 1, there is nothing to search in or with, or the queries are of another model.
    """
    if k < 1:
        raise UserError(f"-k {k}: expected at least 1 neighbour")
    searched = searchable_at(source)
    return nearest(searched, queries_of(queries, searched, run=run, device=device, bar=bar), k, exact=exact, bar=bar)


def searchable_at(source: Path) -> Searchable:
    """A gallery or a folder of embeddings.

    Raises:
        UserError: it is neither, or holds nothing.
    """
    searched = GalleryFolder(source) if holds_gallery(source) else EmbeddingFolder(source)
    if len(searched) == 0:
        raise UserError(f"{source}: holds no embeddings to search in")
    return searched


def nearest(searched: Searchable, asked: Queries, k: int, *, exact: bool = False, bar: Bar = no_bar) -> Answers:
    """The k nearest of each query; all, where there are fewer."""
    gallery = searcher_of(searched, exact=exact)
    k = min(k, len(searched))
    found: list[Neighbors] = []
    with bar("searching", len(asked.paths)) as advance:
        for block in asked.blocks():
            found.append(gallery.search(block, k))
            advance(len(block))
    similarities = torch.cat([torch.empty(0, k), *(one.similarities for one in found)])
    rows = torch.cat([torch.empty(0, k, dtype=torch.int64), *(one.indices for one in found)])
    index = gallery.index if isinstance(gallery, ApproximateGallery) else None
    return Answers(searched, asked.paths, similarities, rows, asked.skipped, index)


def searcher_of(searched: Searchable, *, exact: bool = False) -> StoredGallery | ApproximateGallery:
    """What finds neighbours: the index of a gallery that has one, unless they shall be exact."""
    if isinstance(searched, GalleryFolder) and not exact and (index := searched.approximate):
        return ApproximateGallery(searched, index)
    return StoredGallery(searched.manifold(), searched)
