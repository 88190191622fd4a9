"""`dmlkit cluster`: planted clusters on every manifold, scikit-learn's k-means, and what is refused."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from dmlkit.gallery.sources import open_points
from dmlkit.identify.clusters import NOISE, Clusters, cluster, frechet_kmeans, similarity_sums
from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Sphere
from dmlkit.manifolds.base import Manifold, frechet_mean
from dmlkit.vectors.points import PointsInMemory, in_memory
from tests.conftest import Cli, csv_rows
from tests.identify.test_duplicates import labelled, turned
from tests.vectors.stored import embeddings_at

SPACES: list[Manifold] = [Sphere(8), Euclidean(8), Euclidean(8, similarity="dot"), Poincare(8), Lorentz(8)]
SIZES = (30, 20, 12, 8)


def planted(manifold: Manifold) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    noise = 0.05 * torch.randn(len(labels), 8, generator=torch.Generator().manual_seed(1))
    return manifold.from_features(1.5 * torch.eye(8)[labels] + noise), labels


def same_partition(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one[:, None] == one, other[:, None] == other)


@pytest.mark.parametrize("manifold", SPACES, ids=lambda one: f"{type(one).__name__} {one.similarity_name}")
def test_kmeans_finds_planted_clusters_on_every_manifold(manifold: Manifold):
    points, labels = planted(manifold)
    assert same_partition(frechet_kmeans(manifold, points, 4), labels)


@pytest.mark.parametrize("scale", [1e-30, 1e-12])
@pytest.mark.parametrize("manifold", [Euclidean(8), Poincare(8), Lorentz(8)], ids=lambda one: type(one).__name__)
def test_kmeans_tells_clusters_apart_whose_squared_distances_float32_does_not_hold(manifold: Manifold, scale: float):
    """At the origin every space is flat: the partition is that of the same features at length 1."""
    points, labels = planted(Euclidean(8))
    assert same_partition(frechet_kmeans(manifold, manifold.from_features(points * scale), 4), labels)


def test_kmeans_of_a_row_of_1e30_ends_with_it_alone():
    points, labels = planted(Euclidean(8))
    points[3] *= 1e30
    labels[3] = 4
    assert same_partition(frechet_kmeans(Euclidean(8), points, 5), labels)


@pytest.mark.parametrize("manifold", SPACES, ids=lambda one: f"{type(one).__name__} {one.similarity_name}")
def test_kmeans_ends_whatever_the_rows_are(manifold: Manifold):
    """Damaged rows, off the manifold or not finite: callers refuse them, but a loop must not wait for them."""
    points, _ = planted(manifold)
    for value in (1e30, 1e-30, 0.0, float("inf"), float("nan")):
        damaged = points.clone()
        damaged[3] = value
        assert len(frechet_kmeans(manifold, damaged, 4)) == len(points)


@pytest.mark.parametrize("manifold", [Sphere(3), Euclidean(3), Poincare(3)], ids=lambda one: type(one).__name__)
def test_kmeans_ends_where_every_point_is_nearest_to_its_own_mean(manifold: Manifold):
    points = manifold.from_features(torch.randn(80, 3, generator=torch.Generator().manual_seed(2)))
    clusters = frechet_kmeans(manifold, points, 6)
    means = torch.stack([frechet_mean(manifold, points[clusters == cluster]) for cluster in range(6)])
    assert torch.equal(manifold.similarity(points.double(), means).argmax(1), clusters)


def test_on_flat_space_it_does_as_well_as_scikit_learn():
    points = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    clusters = frechet_kmeans(Euclidean(5), points, 8)
    inertia = sum(float((points[clusters == one] - points[clusters == one].mean(0)).square().sum()) for one in range(8))
    theirs = float(KMeans(8, random_state=0).fit(points.numpy()).inertia_ or 0)
    assert inertia < 1.1 * theirs


def test_more_clusters_than_distinct_points_are_filled():
    clusters = frechet_kmeans(Euclidean(1), torch.tensor([[0.0]] * 4 + [[1.0]] * 2), 4)
    assert clusters.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("manifold", SPACES, ids=lambda one: f"{type(one).__name__} {one.similarity_name}")
def test_the_medoid_is_that_of_all_pairs(manifold: Manifold):
    points = manifold.from_features(torch.randn(60, 8, generator=torch.Generator().manual_seed(5)))
    exact = manifold.paired_similarity(points.double()[:, None], points.double()).sum(1)
    torch.testing.assert_close(similarity_sums(manifold, points), exact, rtol=1e-6, atol=1e-6)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    points, labels = planted(Sphere(8))
    names: list[str | None] = [f"class {label}" for label in labels.tolist()]
    names[0] = None
    return labelled(embeddings_at(tmp_path / "e", points.numpy()), names)


@pytest.fixture
def collection(source: Path) -> PointsInMemory:
    return in_memory(open_points(source))


@pytest.mark.parametrize(
    "options",
    [
        {"clusters": 4},
        {"clusters": 4, "method": "agglomerative"},
        {"threshold": 0.9},
        {"method": "hdbscan"},
        {"method": "hdbscan", "threshold": 0.9},
    ],
    ids=str,
)
def test_every_method_finds_planted_clusters_the_largest_first(collection: PointsInMemory, options: dict[str, Any]):
    clustered = cluster(collection, **options)
    assert torch.equal(clustered.assignments, torch.arange(4).repeat_interleave(torch.tensor(SIZES)))
    assert (clustered.purity(), clustered.nmi(), clustered.noise) == (1.0, pytest.approx(1.0), 0)


@pytest.mark.parametrize(("degrees", "expected"), [(2, [0, 1, 2, 3]), (10, [0, 0, 1, 1]), (85, [0, 0, 0, 0])])
def test_hdbscan_splits_no_images_within_the_threshold(tmp_path: Path, degrees: float, expected: list[int]):
    """Dense regions of 1 degree; gaps of 7, 81 and 7 degrees between them."""
    angles = np.add.outer((0.0, 8.0, 90.0, 98.0), np.linspace(0, 1, 6))
    collection = in_memory(open_points(embeddings_at(tmp_path / "e", turned(*angles.ravel().tolist()))))
    clustered = cluster(collection, method="hdbscan", threshold=float(np.cos(np.deg2rad(degrees))))
    assert same_partition(clustered.assignments, torch.tensor(expected).repeat_interleave(6))


def test_purity_and_majorities_are_those_of_a_count(collection: PointsInMemory):
    found = Clusters(collection, torch.arange(70) % 3)
    right = 0
    for one in range(3):
        labels = [collection.labels[row] for row in range(70) if row % 3 == one and collection.labels[row]]
        right += max(labels.count(label) for label in set(labels))
    assert found.purity() == pytest.approx(right / 69)


def test_images_in_no_cluster_are_counted_and_written(collection: PointsInMemory, tmp_path: Path):
    assignments = torch.zeros(70, dtype=torch.int64)
    assignments[5:9] = NOISE
    found = Clusters(collection, assignments)
    found.write(tmp_path / "x.csv")
    rows = csv_rows(tmp_path / "x.csv")
    assert found.noise == 4 and [row["cluster"] for row in rows] == ["1"] * 66 + [""] * 4
    assert [row["is_medoid"] for row in rows] == ["1"] + ["0"] * 69


def test_the_screen_the_table_and_the_page(source: Path, dmlkit: Cli, tmp_path: Path):
    result = dmlkit("cluster", source, "-k", 4, "-o", tmp_path / "x.csv", "-o", tmp_path / "x.html").ok()
    assert "70 images in 4 clusters: purity 1.0000, nmi 1.0000" in result.out
    text = (tmp_path / "x.html").read_text(encoding="utf-8")
    assert text.count("<section ") == 4 and "cluster 1, 30 images" in text and "<b>" not in text
    assert sum(row["is_medoid"] == "1" for row in csv_rows(tmp_path / "x.csv")) == 4


def test_without_labels_nothing_is_said_of_purity(dmlkit: Cli, tmp_path: Path):
    source = labelled(embeddings_at(tmp_path / "e", turned(0, 1, 90)), [None] * 3)
    assert "\n3 images in 2 clusters\n" in dmlkit("cluster", source, "--threshold", 0.9).ok().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "cluster: expected -k COUNT or --threshold SIMILARITY"),
        (["--threshold", 0.5, "--method", "kmeans"], "--method kmeans: expected -k COUNT"),
        (["-k", 2, "--method", "hdbscan"], "determines the number of clusters itself"),
        (["-k", 4], "-k 4: expected 1 to 3, the images of"),
        (["--threshold", 2], "expected at most 1"),
        (["--method", "hdbscan"], "has 3 images; expected at least 6"),
        (["-k", 2, "-o", "."], "expected a name that ends in .csv or .html"),
    ],
    ids=str,
)
def test_bad_input_is_told_in_a_line(dmlkit: Cli, tmp_path: Path, words: list[object], message: str):
    result = dmlkit("cluster", embeddings_at(tmp_path / "e", turned(0, 1, 90)), *words)
    assert result.code == 2 and result.err.startswith("error: ") and message in " ".join(result.err.split())


def test_options_that_do_not_go_together_are_refused_before_points_are_read(dmlkit: Cli, tmp_path: Path):
    (tmp_path / "x.npy").write_text("no array")
    dmlkit("cluster", tmp_path / "x.npy", "-k", 2, "--threshold", 0.5).refused("got both -k and --threshold")


@pytest.mark.parametrize("words", [["-k", 2, "--method", "agglomerative"], ["--method", "hdbscan"]], ids=str)
def test_methods_of_scikit_learn_name_the_extra_before_points_are_read(dmlkit, tmp_path, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    (tmp_path / "x.npy").write_text("no array")
    dmlkit("cluster", tmp_path / "x.npy", *words).refused(
        "needs scikit-learn; install it with: pip install 'dmlkit[cluster]'"
    )
    points = embeddings_at(tmp_path / "e", turned(0, 1, 90))
    for others in (["-k", 2], ["--threshold", 0.9]):
        assert dmlkit("cluster", points, *others).code == 0


def test_one_image_is_one_cluster(dmlkit: Cli, tmp_path: Path):
    assert "1 image in 1 cluster" in dmlkit("cluster", embeddings_at(tmp_path / "e", turned(3)), "-k", 1).ok().out
    dmlkit("cluster", tmp_path / "e", "-k", 1, "--method", "agglomerative").refused("expected at least 2")
