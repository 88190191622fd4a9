"""`dmlkit identify` and plain NumPy: every manifold, each way to decide, ties and thresholds."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dmlkit.files.labels import UNKNOWN
from dmlkit.gallery.change import create_gallery
from dmlkit.gallery.manifest import GalleryManifest
from dmlkit.identify import decisions
from dmlkit.identify.identify import identify
from dmlkit.identify.rule import LabelRule
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.manifolds.lorentz import Lorentz
from dmlkit.manifolds.poincare import Poincare
from dmlkit.manifolds.sphere import Sphere
from dmlkit.vectors.manifest import Description, Manifest, index_of
from tests.gallery.test_index import add_points
from tests.vectors.stored import ON_CPU

DIM, ROWS, QUERIES = 4, 60, 24
K = 0.7  # of the curved spaces, less than 0
SPACES: dict[str, ManifoldConfig] = {
    "sphere": Sphere.Config(),
    "flat": Euclidean.Config(),
    "dot": Euclidean.Config(similarity="dot"),
    "ball": Poincare.Config(curvature=-K),
    "hyperboloid": Lorentz.Config(curvature=-K),
}


def similarity(space: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of each x (N, D) to each y (M, D), by the textbook."""
    if space == "sphere":
        norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)
        return x @ y.T / norms
    if space == "dot":
        return x @ y.T
    squares = ((x[:, None] - y) ** 2).sum(-1)
    if space == "flat":
        return -np.sqrt(squares)
    if space == "ball":
        room = (1 - K * (x**2).sum(1))[:, None] * (1 - K * (y**2).sum(1))
        return -np.arccosh(1 + 2 * K * squares / room) / np.sqrt(K)
    product = x[:, 1:] @ y[:, 1:].T - upper(x)[:, None] * upper(y)
    return -np.arccosh(np.maximum(-K * product, 1)) / np.sqrt(K)


def upper(x: np.ndarray) -> np.ndarray:
    """The first coordinate, which float32 rounds, from the others."""
    return np.sqrt(1 / K + (x[:, 1:] ** 2).sum(1))


def decide(space: str, voting: int, points: np.ndarray, owners: list[str], query: np.ndarray) -> Any:
    """Label, score and margin of one query; each point votes for its owner."""
    scores = similarity(space, query[None], points)[0]
    order = sorted(range(len(scores)), key=lambda row: (-scores[row], row))
    ranked = [(owners[row], float(scores[row])) for row in order]
    voters = [label for label, _ in ranked[:voting]]
    winner = max(dict.fromkeys(voters), key=lambda label: (voters.count(label), -voters.index(label)))
    best = dict(reversed(ranked))
    return winner, best[winner], best[winner] - max(score for label, score in best.items() if label != winner)


def stocked(place: Path, folder: Path, space: str) -> tuple[np.ndarray, list[str], np.ndarray]:
    """A gallery and queries; a third of the images is there twice, under another label, and some queries are images."""
    gallery, manifold = folder / "gallery", SPACES[space].build(DIM)
    create_gallery(place / "run", None, gallery, model=ON_CPU)
    of_space = {"manifold": SPACES[space], "similarity": manifold.similarity_name, "index": index_of(manifold)}
    shape = {"dim": manifold.point_dim, "features": DIM}
    manifest = GalleryManifest.read(gallery / "gallery.json").model_copy(update={**of_space, **shape})
    manifest.write(gallery / "gallery.json")
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(ROWS, DIM, generator=generator)
    features[1::3] = features[::3]
    labels = [f"c{(row * row + row // 3) % 5}" for row in range(ROWS)]
    add_points(gallery, features, 0, labels)
    asked = torch.cat([torch.randn(QUERIES - 6, DIM, generator=generator), features[:6]])
    queries = manifold.from_features(asked).numpy().astype(np.float32)
    (folder / "asked").mkdir()
    np.save(folder / "asked" / "embeddings.npy", queries)
    items = {"id": range(QUERIES), "path": [f"{row}.jpg" for row in range(QUERIES)], "label": [None] * QUERIES}
    types = pa.schema([("id", pa.int64()), ("path", pa.string()), ("label", pa.string())])
    parquet.write_table(
        pa.table({name: list(column) for name, column in items.items()}, types), folder / "asked/items.parquet"
    )
    described = {name: getattr(manifest, name) for name in Description.model_fields}
    Manifest(**described, source="none", count=QUERIES, skipped=()).write(folder / "asked" / "manifest.json")
    return manifold.from_features(features).numpy().astype(np.float64), labels, queries.astype(np.float64)


@pytest.mark.parametrize("space", SPACES)
def test_decisions_are_those_of_numpy(space: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decisions, "FIRST", 2)  # so that it has to look further
    points, labels, queries = stocked(place, tmp_path, space)
    ties = 0
    for by, k in (("nearest", 1), ("vote", 1), ("vote", 2), ("vote", 5), ("vote", ROWS)):
        expected = [decide(space, k, points, labels, query) for query in queries]
        scores = sorted(score for _, score, _ in expected)
        none = (None, 1e9) if by == "nearest" else ()  # what is known is decided after the label
        for threshold in (scores[len(scores) // 2] - 1e-4, *none):
            identified = identify(
                tmp_path / "gallery",
                tmp_path / "asked",
                rule=LabelRule(by, k if by == "vote" else None, threshold),  # type: ignore[arg-type]
            )
            for answer, (label, score, margin) in zip(identified.answers, expected, strict=True):
                if threshold is not None and abs(score - threshold) < 5e-5:
                    continue
                known = threshold is None or score >= threshold
                assert answer.label == (label if known else UNKNOWN), (by, k, threshold)
                assert answer.score == pytest.approx(score, abs=2e-5)
                assert answer.margin == pytest.approx(margin, abs=4e-5)
        ties += sum(margin == 0 for _, _, margin in expected)
    assert ties > 20  # equal images of two labels: the one that was added first
