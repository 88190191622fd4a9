"""`dmlkit identify` and plain NumPy: every manifold, each way to decide, ties and thresholds."""

from typing import Any

import numpy as np
import pytest
import torch

from dmlkit.files.labels import UNKNOWN
from dmlkit.identify import decisions
from dmlkit.identify.identify import Identifier
from dmlkit.identify.rule import LabelRule
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.manifolds.lorentz import Lorentz
from dmlkit.manifolds.poincare import Poincare
from dmlkit.manifolds.sphere import Sphere
from dmlkit.vectors.points import PointsInMemory

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


@pytest.mark.parametrize("space", SPACES)
def test_decisions_are_those_of_numpy(space: str, monkeypatch: pytest.MonkeyPatch):
    """A third of the images is there twice, under another label, and some queries are images."""
    monkeypatch.setattr(decisions, "FIRST", 2)  # so that it has to look further
    manifold, generator = SPACES[space].build(DIM), torch.Generator().manual_seed(1)
    features = torch.randn(ROWS, DIM, generator=generator)
    features[1::3] = features[::3]
    others = torch.cat([torch.randn(QUERIES - 6, DIM, generator=generator), features[:6]])
    labels = [f"c{(row * row + row // 3) % 5}" for row in range(ROWS)]
    names = [f"{row}.jpg" for row in range(ROWS)]
    searched = PointsInMemory("labeled", manifold, manifold.from_features(features), names, labels)
    asked = PointsInMemory("asked", manifold, manifold.from_features(others), names[:QUERIES], [None] * QUERIES)
    points, queries = (side.points.double().numpy() for side in (searched, asked))
    ties = 0
    for by, k in (("nearest", 1), ("vote", 1), ("vote", 2), ("vote", 5), ("vote", ROWS)):
        expected = [decide(space, k, points, labels, query) for query in queries]
        scores = sorted(score for _, score, _ in expected)
        none = (None, 1e9) if by == "nearest" else ()  # what is known is decided after the label
        for threshold in (scores[len(scores) // 2] - 1e-4, *none):
            rule: Any = LabelRule(by, k if by == "vote" else None, threshold)  # type: ignore[arg-type]
            answers = Identifier(searched, rule).answers(asked, asked.labels).answers
            for answer, (label, score, margin) in zip(answers, expected, strict=True):
                if threshold is not None and abs(score - threshold) < 5e-5:
                    continue
                known = threshold is None or score >= threshold
                assert answer.label == (label if known else UNKNOWN), (by, k, threshold)
                assert answer.score == pytest.approx(score, abs=2e-5)
                assert answer.margin == pytest.approx(margin, abs=4e-5)
        ties += sum(margin == 0 for _, _, margin in expected)
    assert ties > 20  # equal images of two labels: the one that was added first
