"""Clustering metrics against counts, naive pairs and scikit-learn; k-means against its definition."""

import warnings
from collections import Counter
from itertools import combinations
from math import log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans, kmeans_plusplus
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import adjusted_mutual_info_score

from dmlkit.metrics import AmiConfig, AriConfig, F1Config, NmiConfig
from dmlkit.metrics.clustering import kmeans, kmeans_plus_plus, squarable

partitions = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=40)


def naive_information(labels, clusters) -> float:
    """Mutual information over the mean entropy, from counts."""
    total = len(labels)
    both, a, b = Counter(zip(labels, clusters, strict=True)), Counter(labels), Counter(clusters)
    information = sum(n / total * log(n * total / (a[i] * b[j])) for (i, j), n in both.items())
    entropies = [-sum(n / total * log(n / total) for n in sizes.values()) for sizes in (a, b)]
    return 2 * information / sum(entropies) if sum(entropies) else 1.0


@settings(deadline=None, max_examples=40)
@given(partitions)
def test_information_against_counts_and_scikit_learn(items):
    labels, clusters = zip(*items, strict=True)
    tensors = torch.tensor(labels), torch.tensor(clusters)
    assert NmiConfig().agreement(*tensors) == pytest.approx(naive_information(labels, clusters), abs=1e-9)
    if len(set(labels)) > 1 or len(set(clusters)) > 1:
        theirs = adjusted_mutual_info_score(labels, clusters)
        assert AmiConfig().agreement(*tensors) == pytest.approx(theirs, abs=1e-7)


@settings(deadline=None, max_examples=40)
@given(partitions)
def test_rand_index_and_f1_against_all_pairs(items):
    pairs = list(combinations(items, 2))
    same_class = sum(a[0] == b[0] for a, b in pairs)
    same_cluster = sum(a[1] == b[1] for a, b in pairs)
    both, total = sum(a == b for a, b in pairs), same_class + same_cluster
    chance = same_class * same_cluster / len(pairs) if pairs else 0.0
    room = total / 2 - chance
    labels, clusters = (torch.tensor(column) for column in zip(*items, strict=True))
    assert AriConfig().agreement(labels, clusters) == pytest.approx((both - chance) / room if room else 1.0, abs=1e-12)
    assert F1Config().agreement(labels, clusters) == pytest.approx(2 * both / total if total else 1.0)


def test_large_partitions_against_counts_and_scikit_learn():
    rng = np.random.default_rng(0)
    labels, clusters = rng.integers(0, 300, 3000), rng.integers(0, 300, 3000)
    clusters[:2000] = labels[:2000]
    tensors = torch.from_numpy(labels), torch.from_numpy(clusters)
    assert NmiConfig().agreement(*tensors) == pytest.approx(naive_information(labels, clusters), abs=1e-10)
    assert AmiConfig().agreement(*tensors) == pytest.approx(adjusted_mutual_info_score(labels, clusters), abs=1e-8)


def blobs(classes: int, each: int, noise: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(classes, 16, generator=generator).repeat_interleave(each, 0)
    return centers + noise * torch.randn(classes * each, 16, generator=generator)


def test_kmeans_ends_at_a_fixed_point():
    """Where Lloyd's algorithm has settled every point is with its nearest mean: the pruned search lost nothing."""
    points = blobs(60, 12, 0.8).double()
    result = kmeans(points, 60, iterations=300)
    means = torch.stack([points[result.assignments == j].mean(0) for j in range(60)])
    squared = torch.cdist(points, means).square()
    assert torch.equal(squared.argmin(1), result.assignments)
    assert result.inertia == pytest.approx(squared.min(1).values.sum().item(), rel=1e-9)


def test_kmeans_equals_lloyd_step_by_step():
    points = blobs(40, 10, 1.0).double()
    nearest, seeds = kmeans_plus_plus(points, 40, torch.Generator().manual_seed(0))
    assert torch.equal(nearest, torch.cdist(points, points[seeds]).argmin(1))
    for iterations in (1, 2, 3, 7):
        ours = kmeans(points, 40, iterations=iterations, seed=0)
        centroids, assignments = points[seeds], nearest
        for _ in range(iterations):
            centroids = torch.stack([points[assignments == j].mean(0) for j in range(40)])
            assignments = torch.cdist(points, centroids).argmin(1)
        assert torch.equal(ours.assignments, assignments)


def test_kmeans_is_as_good_as_scikit_learn():
    points = blobs(50, 20, 0.5)
    runs = []
    for seed in range(8):
        seeds, _ = kmeans_plusplus(points.numpy(), 50, random_state=seed, n_local_trials=1)
        runs.append(KMeans(50, init=seeds, n_init=1).fit(points.numpy()).inertia_)
    ours = [kmeans(points, 50, seed=seed).inertia for seed in range(8)]
    assert np.mean(ours) == pytest.approx(np.mean(runs), rel=0.05)


def test_restarts_and_seeds():
    points = blobs(30, 10, 1.0)
    one, again = (kmeans(points, 30, seed=3) for _ in range(2))
    assert torch.equal(one.assignments, again.assignments)
    inertias = [[kmeans(points, 30, seed=seed, restarts=count).inertia for count in (1, 6)] for seed in range(5)]
    assert all(best <= first for first, best in inertias) and any(best < first for first, best in inertias)


DRAWS = 1000


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_seeds_follow_the_squared_distances(scale):
    """The second and third seed of five points on a line, by chi-square against their exact probabilities; also where
    float32 holds no square of them."""
    line = torch.tensor([[0.0], [1.0], [3.0], [4.0], [10.0]])
    squared, points = (line - line.T).square().numpy(), squarable(line * scale)
    exact = np.zeros((5, 5))
    for a in range(5):
        for b in range(5):
            second = squared[a] / squared[a].sum()
            rest = np.minimum(squared[a], squared[b])
            exact[b] += second[b] / 5 * rest / rest.sum() if b != a else 0
    generator = torch.Generator().manual_seed(0)
    draws = [kmeans_plus_plus(points, 3, generator)[1].tolist() for _ in range(DRAWS)]
    counts = np.zeros((5, 5))
    for _, b, c in draws:
        counts[b, c] += 1
    cells = exact > 0
    chi_square = ((counts[cells] - DRAWS * exact[cells]) ** 2 / (DRAWS * exact[cells])).sum()
    assert counts[~cells].sum() == 0
    assert chi_square < 45.3  # 99.9 % quantile for 20 cells


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_no_place_is_a_seed_twice_where_another_is_left(size: float):
    places = size * torch.eye(6).repeat(40, 1)
    for seed in range(10):
        seeds = kmeans_plus_plus(places, 6, torch.Generator().manual_seed(seed))[1]
        assert len(places[seeds].unique(dim=0)) == 6


def test_fewer_distinct_points_than_clusters():
    result = kmeans(torch.eye(3).repeat(5, 1), 6)
    assert result.inertia == 0
    assert [len(result.assignments[i::3].unique()) for i in range(3)] == [1, 1, 1]


def extremes() -> dict[str, torch.Tensor]:
    """Points whose squared distances leave float32: blobs of 6 classes, whole, or with one row of them elsewhere."""
    ordinary = blobs(6, 10, 0.1)
    changed = {name: ordinary.clone() for name in ("one row of 1e30", "one row of 1e-30", "one row of zeros")}
    changed["one row of 1e30"][3] *= 1e30
    changed["one row of 1e-30"][3] *= 1e-30
    changed["one row of zeros"][3] = 0
    return {**changed, "all of 1e30": ordinary * 1e30, "all of 1e-30": ordinary * 1e-30, "denormal": ordinary * 1e-42}


@pytest.mark.parametrize("name", extremes())
def test_extreme_lengths_cluster_as_in_float64(name):
    """By NumPy's Lloyd from the same seeds, and by the inertia of scikit-learn's best of 20."""
    points = extremes()[name]
    wide = points.double().numpy() / points.abs().max().item()
    _, seeds = kmeans_plus_plus(squarable(points), 7, torch.Generator().manual_seed(0))
    assert len(set(seeds.tolist())) == 7
    centers = wide[seeds]
    for _ in range(20):
        found = ((wide[:, None] - centers) ** 2).sum(2).argmin(1)
        centers = np.stack([wide[found == j].mean(0) for j in range(7)])
    assert kmeans(points, 7).assignments.tolist() == found.tolist()
    best = kmeans(points, 7, restarts=20).assignments.numpy()
    inertia = sum(((wide[best == j] - wide[best == j].mean(0)) ** 2).sum() for j in range(7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # it takes the mean off, and with 1e30 all digits of others
        assert inertia <= KMeans(7, n_init=20, random_state=0).fit(wide).inertia_ * (1 + 1e-5) + 1e-60


def test_clusters_do_not_depend_on_where_the_origin_is():
    draw, far = np.random.default_rng(0), 1e5
    classes = np.arange(120) % 4
    x = (30 * draw.normal(size=(4, 8))[classes] + draw.normal(size=(120, 8)) + far).astype(np.float32)
    clusters = kmeans(torch.tensor(x), 4, restarts=10).assignments
    reference = KMeans(4, n_init=10, random_state=0).fit(x.astype(np.float64) - far).labels_
    assert adjusted_mutual_info_score(reference, clusters) == pytest.approx(1)


def test_nothing_finite_ends():
    """Callers refuse such rows; a caller that forgets to gets seeds, not a loop without end."""
    for value in (float("nan"), float("inf")):
        points = torch.eye(5)
        points[2, 2] = value
        assert len(kmeans_plus_plus(points, 4, torch.Generator().manual_seed(0))[1]) == 4
    assert kmeans_plus_plus(torch.zeros(5, 2), 4, torch.Generator())[1].unique().numel() == 4


def test_bad_input():
    with pytest.raises(ValueError, match="expected between 1 and 3 clusters, got 4"):
        kmeans(torch.eye(3), 4)
