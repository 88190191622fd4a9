"""Spread and norms against loops, spectrum against NumPy's singular values and SciPy's entropies."""

from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.stats import entropy

from dmlkit.manifolds import Euclidean, Poincare, Sphere
from dmlkit.metrics import retrieval_metrics
from dmlkit.metrics.base import MetricConfig, Points

LABELS = [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]  # the last class has no pair


def naive_spread(points, centre, distance):
    members = [[x for x, label in zip(points, LABELS, strict=True) if label == wanted] for wanted in range(4)]
    within = [np.mean([distance(a, b) for a, b in permutations(group, 2)]) for group in members if len(group) > 1]
    between = np.mean([distance(a, b) for a, b in permutations([centre(group) for group in members], 2)])
    return np.mean(within), between


def lengths(a, b):
    return np.sqrt(((a - b) ** 2).sum())


def unit_mean(group):
    return np.mean(group, axis=0) / lengths(np.mean(group, axis=0), 0)


def in_ball(a, b):
    gap = lengths(a, b) ** 2 / ((1 - (a**2).sum()) * (1 - (b**2).sum()))
    return np.arccosh(1 + 2 * gap)


@pytest.mark.parametrize(
    ("manifold", "centre", "distance"),
    [
        (Euclidean(3), lambda group: np.mean(group, axis=0), lengths),
        (Sphere(3), unit_mean, lengths),
        (Poincare(3), lambda group: np.mean(group, axis=0), in_ball),
    ],
)
def test_spread_against_loops(manifold, centre, distance):
    features = torch.randn(10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = manifold.double().from_features(features)
    figures = retrieval_metrics(points, LABELS, manifold=manifold, metrics=["spread"])
    within, between = naive_spread(points.numpy(), centre, distance)
    assert figures["intra_distance"] == pytest.approx(within, rel=1e-9)
    assert figures["inter_distance"] == pytest.approx(between, rel=1e-9)
    assert figures["density"] == pytest.approx(within / between, rel=1e-9)


def test_spread_far_from_the_origin():
    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32) + np.float32(1000)
    labels = np.arange(12) % 3
    spread = retrieval_metrics(x, labels, manifold=Euclidean(4), metrics=["spread"])
    classes = [x[labels == label].astype(np.float64) for label in range(3)]
    within = [np.mean([np.linalg.norm(a - b) for a, b in permutations(rows, 2)]) for rows in classes]
    between = [np.linalg.norm(a - b) for a, b in permutations([rows.mean(0) for rows in classes], 2)]
    assert spread["intra_distance"] == pytest.approx(np.mean(within), rel=1e-6)
    assert spread["inter_distance"] == pytest.approx(np.mean(between), rel=1e-6)


def test_spread_of_classes_of_one_image_has_distances_of_centers_alone():
    figures = retrieval_metrics(
        torch.eye(3).repeat(2, 1), [0, 1, 2] * 2, manifold=Euclidean(3), metrics=["spread"]
    )  # both images of a class are equal
    assert figures["intra_distance"] == figures["density"] == 0 and figures["inter_distance"] == pytest.approx(2**0.5)
    scattered = MetricConfig.variants["spread"]().of_points(Points(torch.eye(3), torch.arange(3), Euclidean(3)))
    assert scattered == {**figures, "inter_distance": pytest.approx(2**0.5)}


def from_origin(a):
    return 2 * np.arctanh(lengths(a, 0))


@pytest.mark.parametrize(
    ("manifold", "length"),
    [(Euclidean(3), lambda a: lengths(a, 0)), (Sphere(3), lambda a: 1), (Poincare(3), from_origin)],
)
def test_norms_are_the_ways_from_the_origin(manifold, length):
    features = torch.randn(10, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points = manifold.double().from_features(features)
    figures = retrieval_metrics(points, LABELS, manifold=manifold, metrics=["norm"])
    expected = [length(point) for point in points.numpy()]
    assert figures["norm"] == pytest.approx(np.mean(expected), rel=1e-9)
    assert figures["squared_norm"] == pytest.approx(np.mean(np.square(expected)), rel=1e-9)


def test_the_density_of_classes_around_one_centre_is_finite_t13():
    points = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]])
    figures = retrieval_metrics(points, torch.tensor([0, 0, 1, 1]), manifold=Euclidean(2), metrics=["spread"])
    assert figures["inter_distance"] == 0 and 1e9 < figures["density"] < float("inf")


@pytest.mark.parametrize("repeats", [False, True])  # a coordinate, whose singular value is 0
@pytest.mark.parametrize("dim", [4, 30])  # fewer directions than points, and more
def test_spectrum_against_numpy(dim, repeats):
    points = torch.randn(10, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * torch.arange(
        1, dim + 1
    )
    points[:, 0] = points[:, 1] if repeats else points[:, 0]
    figures = retrieval_metrics(points, LABELS, manifold=Euclidean(dim), metrics=["spectrum"])
    shares = np.linalg.svd(points.numpy(), compute_uv=False)
    shares = (shares / shares.sum()).clip(1e-12)
    uniform = np.full(len(shares), 1 / len(shares))
    assert figures["spectral_decay"] == pytest.approx(entropy(uniform, shares), rel=1e-6)
    assert figures["effective_rank"] == pytest.approx(np.exp(entropy(shares)), rel=1e-6)


def test_one_class_has_no_distance_between_centers():
    levels = {"genus": [0] * 4, "species": [0, 0, 1, 1]}
    for arguments, name in (
        ((np.eye(4), levels), "spread:genus"),
        ((np.eye(4), [0] * 4, np.eye(4), [0, 0, 1, 1]), "spread"),
    ):
        with pytest.raises(ValueError, match=r"^labels: all 4 embeddings are of one class; spread needs at least two$"):
            retrieval_metrics(*arguments, metrics=[name])
