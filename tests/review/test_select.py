"""`dmlkit select`: compared with naive loops and scikit-learn, near-duplicates, tables, and what is refused."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from torch import Tensor

from dmlkit.manifolds import Euclidean, Poincare, Sphere
from dmlkit.manifolds.base import Manifold
from dmlkit.review import select as selecting
from dmlkit.review.select import ROUNDS, Rule, measure, select
from dmlkit.vectors.points import PointsInMemory
from tests.conftest import Cli, csv_rows
from tests.datasets import trees

HIGHEST = {"sphere": 1.0, "euclidean": 0.0, "dot": 1e9, "poincare": 0.0}
SPACES = {
    "sphere": Sphere(3),
    "euclidean": Euclidean(3),
    "dot": Euclidean(3, similarity="dot"),
    "poincare": Poincare(3),
}


def draw(space: Manifold, count: int, seed: int) -> Tensor:
    return space.from_features(torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)))


def labeled_and_not(space: Manifold, labels: list[str | None], seed: int = 0) -> PointsInMemory:
    names = [f"{row}.jpg" for row in range(len(labels))]
    return PointsInMemory("points", space, draw(space, len(labels), seed), names, labels)


def uncertainty(distances: list[float], labels: list[str]) -> float:
    """Distance to the nearest labeled point over that to the nearest with another label, by hand."""
    ranked = sorted(zip(distances, labels, strict=True))
    return ranked[0][0] / next(distance for distance, label in ranked if label != ranked[0][1])


def naive(points: PointsInMemory, count: int, rule: Rule) -> list[int]:
    """Both rules by loops over every candidate, covered point and center, in float64; labeled points come first."""
    labels, everything = [one for one in points.labels if one is not None], points.points.double()
    rows, known = range(len(labels), len(points)), range(len(labels))
    similarity = [[float(points.manifold.paired_similarity(a, b)) for b in everything] for a in everything]
    origin = max(similarity[row][row] for row in range(len(points)))
    distance = [[max(origin - value, 0) for value in row] for row in similarity]
    weights = {row: uncertainty([distance[row][one] for one in known], labels) for row in rows}
    centers = list(known)
    for _ in range(count):
        scores: dict[int, float] = {}
        for x in rows:
            if x not in centers and rule == "k_center":
                scores[x] = weights[x] * min(distance[x][c] for c in centers)
            elif x not in centers:
                nearest = {y: min(distance[y][c] for c in centers) for y in rows}
                scores[x] = sum(weights[y] * (nearest[y] - min(nearest[y], distance[y][x])) for y in rows)
        centers.append(max(scores, key=lambda x: scores[x]))
    return [row - len(labels) for row in centers[len(labels) :]]


@pytest.mark.parametrize("rule", ["coverage", "k_center"])
@pytest.mark.parametrize("name", SPACES)
def test_choices_are_those_of_naive_loops(name: str, rule: Rule, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selecting, "TRIED", 3)  # so that most gains are old ones, which are bounds
    points = labeled_and_not(SPACES[name], ["a", "b", "a", "c", *[None] * 24])
    chosen = select(points, count=12, rule=rule, threshold=HIGHEST[name])
    assert chosen.rows.tolist() == naive(points, 12, rule)
    assert chosen.images.paths[int(chosen.rows[0])] == f"{int(chosen.rows[0]) + 4}.jpg" and chosen.duplicates == 0


@pytest.mark.parametrize("rule", ["coverage", "k_center"])
def test_choices_far_from_the_origin_are_those_of_naive_loops(rule: Rule):
    near = labeled_and_not(SPACES["euclidean"], ["a", "b", "a", "c", *[None] * 24])
    points = PointsInMemory("points", near.manifold, near.points + 1000, near.paths, near.labels)
    assert select(points, count=12, rule=rule, threshold=0.0).rows.tolist() == naive(points, 12, rule)


def test_uncertainty_is_that_of_the_neighbors_of_scikit_learn():
    points = labeled_and_not(SPACES["euclidean"], [*"aabbccdd", *[None] * 20], seed=1)
    chosen = select(points, count=20, threshold=0.0)
    known, rest = points.points[:8].numpy(), points.points[8:].numpy()[chosen.rows]
    distances, near = NearestNeighbors(n_neighbors=8).fit(known).kneighbors(rest)
    columns = (chosen.guesses, chosen.similarities, chosen.margins, distances, near)
    for guess, similarity, margin, row, order in zip(*columns, strict=True):
        labels = np.array(points.labels[:8])[order]
        assert guess == labels[0] and -float(similarity) == pytest.approx(row[0], rel=1e-5)
        assert float(margin) == pytest.approx(row[labels != labels[0]][0] - row[0], rel=1e-4, abs=1e-5)


def test_scores_of_coverage_are_the_shares_that_the_mean_distance_loses():
    points = labeled_and_not(SPACES["euclidean"], ["a", *[None] * 30], seed=2)  # one label: all weights are 1
    chosen = select(points, count=5, threshold=0.0)
    known, rest = points.points[:1].numpy(), points.points[1:].numpy()

    def mean_distance(rows: list[int]) -> float:
        centers = np.concatenate([known, rest[rows]])
        return float(NearestNeighbors(n_neighbors=1).fit(centers).kneighbors(rest)[0].mean())

    rows, before = chosen.rows.tolist(), mean_distance([])
    lost = [(mean_distance(rows[:step]) - mean_distance(rows[: step + 1])) / before for step in range(5)]
    assert chosen.scores.tolist() == pytest.approx(lost, abs=1e-5)


@pytest.mark.parametrize("rule", ["coverage", "k_center"])
def test_near_duplicates_of_labeled_and_of_chosen_images_are_left_out(rule: Rule):
    angles = torch.deg2rad(torch.tensor([0.0, 3, 60, 1, 61, 62, 120, 121, 180]))
    circle = torch.stack([angles.cos(), angles.sin()], 1)
    points = PointsInMemory("circle", Sphere(2), circle, list("ABCDEFGHI"), ["a", "b", *[None] * 7])
    selected = select(points, count=7, rule=rule, threshold=float(np.cos(np.deg2rad(2.5))))
    chosen = {selected.images.paths[row] for row in selected.rows.tolist()}
    assert len(chosen) == 3 and chosen & set("CEF") and chosen & set("GH") and "I" in chosen
    assert selected.duplicates == 4
    first = select(points, count=3, rule=rule).rows.tolist()
    assert {selected.images.paths[row] for row in first} == chosen  # the others are chosen last


def test_without_labels_the_first_is_central_and_equal_images_are_chosen_once():
    line = torch.tensor([[0.0], [10.0], [4.9], [10.0], [0.0]])
    chosen = select(PointsInMemory("line", Euclidean(1), line, list("abcde"), [None] * 5), count=5)
    assert chosen.rows.tolist()[0] == 2 and sorted(chosen.rows.tolist()) == [0, 1, 2]
    assert chosen.duplicates == 2 and chosen.guesses == [None] * 3 and bool(chosen.margins.isnan().all())


def test_only_some_images_are_covered_if_there_are_many(monkeypatch: pytest.MonkeyPatch):
    points = labeled_and_not(SPACES["sphere"], ["a", "b", *[None] * 200])
    whole = select(points, count=10)
    monkeypatch.setattr(selecting, "COVERED", 150)
    part = select(points, count=10)
    assert part.rows.tolist() != whole.rows.tolist() and len(set(part.rows.tolist())) == 10


def test_the_curve_of_random_images_is_that_of_scikit_learn():
    generator = np.random.default_rng(0)
    centers = generator.normal(size=(6, 3))
    codes = generator.integers(0, 6, 90)
    points = torch.from_numpy(centers[codes] + 0.7 * generator.normal(size=(90, 3))).float()
    labels = [None if row < 4 else f"class {code}" for row, code in enumerate(codes)]
    measured = measure(PointsInMemory("blobs", Euclidean(3), points, [""] * 90, labels), 8, seeds=3)
    assert (measured.images, measured.held_out) == (86, 43)
    assert [one.labels for one in measured.points] == [8, 16, 24, 32, 40]
    accuracies: list[list[float]] = []
    for seed in range(3):
        order = 4 + torch.randperm(86, generator=torch.Generator().manual_seed(seed)).numpy()
        pool, asked = order[:43], order[43:]
        known = (pool[: 8 * number] for number in range(1, ROUNDS + 1))
        fits = (KNeighborsClassifier(1).fit(points[rows], codes[rows]) for rows in known)
        accuracies.append([fit.score(points[asked], codes[asked]) for fit in fits])
    assert [one.random for one in measured.points] == pytest.approx(np.mean(accuracies, 0).tolist())
    assert measured.points[0].selected == measured.points[0].random
    mean = np.mean([one.selected - one.random for one in measured.points[1:]])
    assert measured.difference.difference == pytest.approx(float(mean))


@pytest.mark.parametrize("rule", ["coverage", "k_center"])
def test_a_rare_class_is_found_sooner_than_by_chance_and_noise_is_not_separable(rule: Rule):
    generator = torch.Generator().manual_seed(0)
    sizes = [150, *[5] * 10]
    codes = torch.arange(11).repeat_interleave(torch.tensor(sizes))
    points = 20 * torch.eye(11)[codes] + torch.randn(200, 11, generator=generator)
    rare = PointsInMemory("rare", Euclidean(11), points, [""] * 200, [str(code) for code in codes.tolist()])
    measured = measure(rare, 10, rule=rule)
    assert measured.is_separable and measured.difference.low > 0.02
    noise = [str(code) for code in torch.randint(4, (200,), generator=generator).tolist()]
    measured = measure(PointsInMemory("noise", Euclidean(11), points, [""] * 200, noise), 10, rule=rule)
    assert not measured.is_separable


def test_a_folder_is_chosen_from_labeled_and_added(dmlkit: Cli, place: Path, tmp_path: Path):
    gallery, table = tmp_path / "gallery", tmp_path / "next.csv"
    assert dmlkit("gallery", "create", place / "run", place / "photos", "-o", gallery).code == 0
    inbox = tmp_path / "inbox"
    trees.photos(inbox, (f"{index}.jpg" for index in range(8)), first=100, side=(40, 30))
    words = ("select", gallery, inbox, "-n", "3", "-o", table, "--device", "cpu")
    result = dmlkit(*words).ok()
    assert "3 of 8 images to label next" in result.out and f"wrote {table}" in result.out
    rows = csv_rows(table)
    assert [row["label"] for row in rows] == [""] * 3 and all(Path(row["path"]).is_file() for row in rows)
    report = dmlkit(*words, "--json").json()  # nobody has written a label
    assert [image["path"] for image in report["images"]] == [row["path"] for row in rows] and report["unlabeled"] == 8
    assert [f"{image['score']:.9g}" for image in report["images"]] == [row["score"] for row in rows]
    refused = dmlkit("gallery", "add", gallery, table)
    assert refused.code == 2 and "Traceback" not in refused.err
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows([{**row, "label": "fox"} for row in rows])
    kept = table.read_bytes()
    assert dmlkit(*words).code == 0 and (tmp_path / "next.csv.old").read_bytes() == kept
    table.write_bytes(kept)
    assert "3 images added" in dmlkit("gallery", "add", gallery, table).ok().out


def test_labels_of_an_array_and_the_measurement(dmlkit: Cli, tmp_path: Path):
    generator = np.random.default_rng(0)
    codes = np.arange(60) % 6
    np.save(tmp_path / "x.npy", generator.normal(size=(60, 8)) + 4 * np.eye(8)[codes])
    np.save(tmp_path / "y.npy", codes)
    words = ("select", tmp_path / "x.npy", "--labels", tmp_path / "y.npy")
    result = dmlkit(*words, "--measure", "-n", "5").ok()
    assert "accuracy of 30 held-out images" in result.out and "60 images of 6 labels" in result.out
    assert "random choice: mean difference" in result.out
    curve = dmlkit(*words, "--measure", "-n", "5", "--json").json()
    assert f"{curve['difference']['difference']:+.4f}" in result.out and curve["held_out"] == 30
    assert [f"{point['selected']:.4f}" in result.out for point in curve["points"]] == [True] * len(curve["points"])
    dmlkit(*words).refused("every image has a label; name the unlabeled IMAGES")
    result = dmlkit("select", tmp_path / "x.npy", "-n", "70")
    assert result.code == 0 and "note: -n 70 is reduced to 60, the number of images" in result.out
    dmlkit("select", tmp_path / "x.npy", tmp_path / "x.npy").refused("no image has a label; leave out")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure", "-n", "31"], "too few for two rounds; expected at most 14"),
        (["--measure", "-n", "0"], "-n 0: expected at least 1 image"),
        (["--measure", "-n", "5", "--threshold", "1.5"], "--threshold 1.5: expected at most 1"),
        (["--measure", "-o", "next.csv"], "leave out --output next.csv"),
        (["x.npy", "--measure"], "leave out IMAGES x.npy"),
        (["x.npy", "-n", "0"], "-n 0: expected at least 1 image"),
        (["x.npy", "--threshold", "1.5"], "--threshold 1.5: expected at most 1"),
        (["x.npy", "--threshold", "nan"], "--threshold nan: expected at most 1"),
        (["narrow.npy"], "expected 8 coordinates, got 4"),
        (["x.npy", "--split", "test"], "--split test: applies to a run"),
    ],
)
def test_what_is_refused(words: list[str], message: str, dmlkit: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).normal(size=(60, 8)))
    np.save("y.npy", np.arange(60) % 6)
    np.save("narrow.npy", np.ones((3, 4)))
    dmlkit("select", "x.npy", "--labels", "y.npy", *words).refused(message)
