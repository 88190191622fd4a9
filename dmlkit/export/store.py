"""Tables of embeddings in vector stores: destination, manifest, vectors, and the distance that orders them."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from pydantic import PositiveInt

from dmlkit.errors import UserError, first_line
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.index_vectors import Vectors, index_vectors
from dmlkit.vectors.manifest import Manifest, SearchIndex
from dmlkit.vectors.progress_bar import Bar, no_bar

ROWS = 4096  # rows per block: 8 MB at 512 dimensions
StoreDistance = Literal["cosine", "l2", "dot"]


class StoreIndex(SearchIndex, frozen=True, extra="forbid", strict=True):
    """Vectors in a store, and the distance function that gives them the order of the similarity."""

    order: str = "the vectors that are nearest to that of a query, by the distance function, are the most similar"
    """How the store orders vectors."""
    distance: StoreDistance
    """The store's distance function; with ``dot`` the largest products are the nearest."""
    dim: PositiveInt
    """Dimension of a vector; on some manifolds not that of an embedding."""

    def suits_graph(self) -> bool:
        """Return whether a graph index such as HNSW finds the nearest vectors.

        Such an index walks between near vectors of the gallery, but lifted gallery vectors have the right order only
        for a lifted query: HNSW found 6 % of the 5 nearest of 5 000 points in a ball.
        """
        return self.form in ("as_is", "unit", "unit_space")


class StoreManifest(Manifest, frozen=True, strict=True):
    """Manifest of a table in a store: the manifest of its embeddings, and how they are searched there."""

    kind: ClassVar[str] = "manifest of a table of embeddings"

    index: StoreIndex  # pyright: ignore[reportGeneralTypeIssues] - unlike its parent's it has no default
    """How the table is searched."""


@dataclass(frozen=True)
class Destination:
    """Destination of a table."""

    target: str  # a folder or an address
    table: str
    overwrite: bool = False  # replace a table of this name if dmlkit wrote it
    bar: Bar = no_bar  # shows the rows that are written

    def __str__(self) -> str:
        shown = without_password(self.target) if is_address(self.target) else self.target
        return f"{shown}: table {self.table!r}"

    def check_replaceable(self, manifest: str | None) -> None:
        """Check that an existing table may be replaced; ``manifest`` is the text of its manifest, if it has one.

        Raises:
            UserError: ``overwrite`` is not set, or dmlkit did not write the table.
        """
        if not self.overwrite:
            raise UserError(f"{self} already exists; replace it with --overwrite, or choose another --table")
        try:
            StoreManifest.from_json(manifest or "", str(self))
        except UserError:
            raise UserError(
                f"{self} already exists and was not written by dmlkit export; remove it, or choose another --table"
            ) from None

    @contextmanager
    def writing(self, *errors: type[Exception]) -> Generator[None]:
        """Convert errors of a store into errors of one line.

        Raises:
            UserError: the block raises one of the errors.
        """
        try:
            yield
        except errors as error:
            raise UserError(f"{self} cannot be written: {first_line(error)}") from error


class StoreRows(NamedTuple):
    """Consecutive rows of a table."""

    items: Any  # an Arrow table with the columns id, path and label
    vectors: np.ndarray  # (n, D') float32


def store_manifest(folder: EmbeddingFolder) -> StoreManifest:
    """Return the manifest of a table of embeddings.

    Raises:
        UserError: there are no embeddings.
    """
    manifest = folder.manifest
    if not len(folder):
        raise UserError(f"{folder.path}: there are no embeddings to export")
    distance, form = _distance_and_form(manifest)
    search: dict[str, Any] = {"form": form, "curvature": manifest.index.curvature}
    dim = _vectors(folder, torch.from_numpy(np.array(folder.points[:1])), search).shape[1]
    fields: dict[str, Any] = {
        **dict(manifest),
        "index": StoreIndex(**search, distance=distance, dim=dim),
        "checksums": None,  # those of the embeddings are of other files
        "split": None,
    }
    return StoreManifest(**fields)


def rows_of(folder: EmbeddingFolder, index: StoreIndex, bar: Bar = no_bar) -> Iterator[StoreRows]:
    """Yield the rows of a table in blocks.

    Raises:
        UserError: a vector has nan or inf, or is zero although the distance is the cosine.
    """
    start = 0
    with bar("exporting", len(folder)) as advance:
        for block in folder.blocks(ROWS):
            vectors = _vectors(folder, block, index.model_dump()).astype(np.float32)
            for fault, is_faulty in (
                ("its vector would have nan or inf", ~np.isfinite(vectors).all(1)),
                ("its vector is zero, which has no cosine", (index.distance == "cosine") & ~vectors.any(1)),
            ):
                if is_faulty.any():
                    folder.refuse_row(start + int(is_faulty.argmax()), fault)
            yield StoreRows(folder.items.select(["id", "path", "label"]).slice(start, len(block)), vectors)
            start += len(block)
            advance(len(block))


def _vectors(folder: EmbeddingFolder, points: torch.Tensor, search: dict[str, Any]) -> Vectors:
    if search["form"] == "own":
        return folder.manifold.index_vectors(points.double(), "gallery").detach().numpy()
    return index_vectors(points.numpy(), search, "gallery")


def _distance_and_form(manifest: Manifest) -> tuple[StoreDistance, str]:
    """Return the distance and form of vectors; a distance other than cosine, dot and L2 needs a lift."""
    form = manifest.index.form
    match form:
        case "as_is":  # unit vectors, or a dot product
            straight: dict[str, StoreDistance] = {"dot": "dot", "cosine": "cosine"}
            return straight.get(manifest.similarity, "l2"), "as_is"
        case "unit":
            return "cosine", "as_is"
        case "unit_space":
            return "cosine", form
        case "euclidean_lift":
            return "l2", "as_is"
        case _:
            return "dot", form


def is_address(target: str) -> bool:
    """Return whether a text is an address and not a path.

    Example:
        >>> is_address("postgresql://db/birds"), is_address("exports/birds")
        (True, False)
    """
    return "://" in target


def without_password(address: str) -> str:
    """Return an address without its password and without its options, which may contain one.

    Raises:
        UserError: the password cannot be identified; the message then shows no part of the address but its scheme.

    Example:
        >>> without_password("postgresql://me:secret@db:5433/birds?sslmode=require")
        'postgresql://me@db:5433/birds'
    """
    try:
        parts = urlsplit(address)
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:  # the port is not a number; it may be the start of a password
        raise _unclear(address) from None
    if parts.netloc.count("@") > 1 or any("@" in part for part in (parts.path, parts.query, parts.fragment)):
        raise _unclear(address)
    user = f"{parts.username}@" if parts.username else ""
    return f"{parts.scheme}://{user}{parts.hostname or ''}{port}{parts.path}"


def _unclear(address: str) -> UserError:
    scheme = address.partition("://")[0]
    return UserError(
        f"--output {scheme}://...: cannot read this address; expected {scheme}://USER:PASSWORD@HOST:PORT/NAME, where a "
        "password has %40 for @, %3A for :, %2F for /, %3F for ? and %23 for #"
    )
