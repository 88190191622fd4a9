"""`dmlkit search` with re-ranking, which looks at the gallery alone; `dmlkit identify` searches once."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dmlkit.identify.identify import Identifier
from dmlkit.identify.rule import LabelRule
from dmlkit.manifolds import Sphere
from dmlkit.metrics.ranking.rerank import KReciprocal, ReciprocalGallery
from dmlkit.nearest.search import Neighbors, StoredGallery
from dmlkit.vectors.points import PointsInMemory
from tests.conftest import Cli, csv_rows

LABELS = [f"bird {row % 4}" for row in range(32)]


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Overlapping classes on the sphere: 32 labeled points, and 12 others."""
    folder = tmp_path_factory.mktemp("arrays")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 6))[np.arange(44) % 4] + rng.normal(size=(44, 6))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    np.save(folder / "x.npy", x[:32])
    np.save(folder / "z.npy", x[32:])
    np.save(folder / "one.npy", x[37:38])
    np.save(folder / "y.npy", np.array(LABELS))
    return folder


def expanded(one: np.ndarray, others: np.ndarray) -> np.ndarray:
    cosines = others @ one
    nearest = np.argsort(-cosines)[:3]
    total = one + sum(max(cosines[row], 0) ** 2 * others[row] for row in nearest)
    return total / np.linalg.norm(total)


def test_search_by_expansion_is_a_naive_one(arrays: Path, dmlkit: Cli, tmp_path: Path):
    x, z = (np.load(arrays / f"{name}.npy").astype(float) for name in "xz")
    gallery = np.array([expanded(x[row], np.delete(x, row, 0)) for row in range(32)])
    expected = np.array([expanded(one, x) for one in z]) @ gallery.T
    words = ("search", arrays / "x.npy", arrays / "z.npy", "-k", "32", "--rerank", "expansion:n=3,alpha=2")
    report = dmlkit(*words, "--json", "-o", tmp_path / "near.csv").json()
    assert report["rerank"] == {"method": "expansion", "n": 3, "alpha": 2.0} and report["similarity"] == "cosine"
    for query, scores in zip(report["queries"], expected, strict=True):
        near = query["neighbors"]
        assert [one["id"] for one in near] == np.argsort(-scores).tolist()
        assert np.abs(np.array([one["similarity"] for one in near]) - np.sort(scores)[::-1]).max() < 1e-6
    assert [int(row["id"]) for row in csv_rows(tmp_path / "near.csv")][:32] == np.argsort(-expected[0]).tolist()


def test_search_by_k_reciprocal_does_not_look_at_other_queries(arrays: Path, dmlkit: Cli):
    x, z = (torch.from_numpy(np.load(arrays / f"{name}.npy")) for name in "xz")
    expected = 1 + ReciprocalGallery(Sphere(6), x, KReciprocal(8, 3, 0.3)).scores(z)
    words = ("--rerank", "k_reciprocal:k1=8,k2=3", "-k", "32", "--json")
    report = dmlkit("search", arrays / "x.npy", arrays / "z.npy", *words).json()
    assert report["similarity"] == "k_reciprocal_similarity" and report["rerank"]["k1"] == 8
    alone = dmlkit("search", arrays / "x.npy", arrays / "one.npy", *words).json()
    for query, scores in zip(report["queries"], expected, strict=True):
        shown = {one["id"]: one["similarity"] for one in query["neighbors"]}
        assert [*shown.values()] == sorted(shown.values(), reverse=True) and min(shown.values()) >= 0
        assert np.abs(np.array([shown[row] for row in range(32)]) - scores.numpy()).max() < 1e-6
    ranked = report["queries"][5]["neighbors"], alone["queries"][0]["neighbors"]
    assert [one["id"] for one in ranked[0]] == [one["id"] for one in ranked[1]]
    too_many = dmlkit("search", arrays / "x.npy", arrays / "z.npy", "--rerank", "k_reciprocal:k1=32")
    too_many.refused("--rerank: k1: expected 1 to 31, since there are 32 images")
    plain = dmlkit("search", arrays / "x.npy", arrays / "z.npy", "--json").json()
    assert plain["rerank"] is None and plain["queries"][0]["neighbors"] != report["queries"][0]["neighbors"][:10]


def test_identify_searches_once(monkeypatch: pytest.MonkeyPatch):
    """Each of 40 queries is compared with the labeled points once, and the answers are those of two searches."""
    generator = torch.Generator().manual_seed(0)
    points = torch.nn.functional.normalize(torch.randn(104, 6, generator=generator), dim=1)
    names = [f"{row}.jpg" for row in range(104)]
    labels = [str(row % 8) for row in range(64)]
    searched = PointsInMemory("labeled", Sphere(6), points[:64], names[:64], labels)
    asked = PointsInMemory("asked", Sphere(6), points[64:], names[64:], [None] * 40)
    identifier = Identifier(searched, LabelRule(threshold=0.0))
    identifier.estimated = {1: None}  # whose fit searches for labeled points
    expected = identifier.decider.decide(asked.points)
    counted: list[int] = []
    original = StoredGallery.search

    def search(self: StoredGallery, queries: torch.Tensor, k: int) -> Neighbors:
        counted.append(len(queries))
        return original(self, queries, k)

    monkeypatch.setattr(StoredGallery, "search", search)
    answers = identifier.answers(asked, [None] * 40)
    assert sum(counted) == 40
    assert [(one.guess, one.score, one.margin) for one in answers.answers] == [
        (identifier.names[code], score, margin) for code, score, margin in expected
    ]
    assert answers.neighbors.similarities.shape == (40, 3)
