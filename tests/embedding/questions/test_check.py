"""Test of new images against a gallery: naive energy distances, SciPy, and the size of the test under the null."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import energy_distance

from dmlkit.embedding.gallery.change import create_gallery
from dmlkit.embedding.points import PointsInMemory
from dmlkit.embedding.questions import check
from dmlkit.embedding.questions.calibration import calibrate_gallery
from dmlkit.embedding.questions.check import check_queries, compare_images, energy_test, measure_difference
from dmlkit.embedding.questions.decisions import Decider
from dmlkit.errors import UserError
from dmlkit.evaluation.image_gallery import gallery as load_gallery
from dmlkit.manifolds.sphere import Sphere
from tests.conftest import Result
from tests.datasets import trees
from tests.embedding.gallery.conftest import place  # noqa: F401 - a fixture
from tests.embedding.stored import ON_CPU
from tests.fuzz.conftest import FULL

LABELS, DIM = 8, 6


def naive_energy(x: np.ndarray, y: np.ndarray) -> float:
    def mean(one: np.ndarray, other: np.ndarray) -> float:
        return sum(float(np.linalg.norm(a - b)) for a in one for b in other) / (len(one) * len(other))

    return 2 * mean(x, y) - mean(x, x) - mean(y, y)


def test_the_distance_is_the_weighted_mean_of_naive_ones():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, generator=generator), torch.randn(9, 3, generator=generator) + 0.5
    strata = torch.arange(12) % 3, torch.arange(9) % 4 % 3
    found = energy_test(x, y, strata, torch.cdist)
    assert found is not None
    total = weight = 0.0
    for code in range(3):
        own, other = x[strata[0] == code].numpy(), y[strata[1] == code].numpy()
        factor = len(own) * len(other) / (len(own) + len(other))
        total, weight = total + factor * naive_energy(own, other), weight + factor
    assert found.distance == pytest.approx(total / weight, rel=1e-5)


def test_one_dimension_against_scipy_and_all_permutations():
    x, y = np.array([0.0, 0.3, 1.1, 0.7]), np.array([0.9, 2.0, 1.7])
    one = torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    found = energy_test(torch.from_numpy(x)[:, None], torch.from_numpy(y)[:, None], one, torch.cdist)
    assert found is not None
    assert found.distance == pytest.approx(energy_distance(x, y) ** 2)
    both, observed = np.concatenate([x, y]), energy_distance(x, y)
    chosen = list(itertools.combinations(range(7), 4))
    larger = sum(energy_distance(both[[*rows]], np.delete(both, rows)) >= observed - 1e-12 for rows in chosen)
    assert found.p_value == pytest.approx(larger / len(chosen), abs=0.025)  # 35 divisions, 999 draws


def test_without_a_shared_stratum_nothing_is_compared():
    points = torch.zeros(2, 1)
    assert energy_test(points, points, (torch.zeros(2).long(), torch.ones(2).long()), torch.cdist) is None


def drawn(seed: int, moved: float = 0.0, *, same_shares: bool = False) -> tuple[Decider, torch.Tensor]:
    """A gallery of 10 images of each label, and 0 to 12 new images of each, or 48 of random labels."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(LABELS, DIM, generator=generator)

    def images(codes: torch.Tensor, moved: float) -> torch.Tensor:
        points = centers[codes] + 0.3 * torch.randn(len(codes), DIM, generator=generator)
        points[:, 0] += moved
        return torch.nn.functional.normalize(points, dim=1)

    codes = torch.arange(LABELS).repeat_interleave(10)
    counts = torch.randint(0, 13, (LABELS,), generator=generator)
    if same_shares:
        counts = torch.randint(LABELS, (48,), generator=generator).bincount(minlength=LABELS)
    nothing = [""] * len(codes)
    searched = PointsInMemory("gallery", Sphere(DIM), images(codes, 0.0), nothing, nothing)
    return Decider(searched, codes.numpy(), "nearest"), images(torch.arange(LABELS).repeat_interleave(counts), moved)


def test_images_that_moved_differ():
    for seed in range(3):
        decider, queries = drawn(seed, moved=1.0)
        compared = compare_images(decider, queries, np.arange(len(queries)))
        found = measure_difference(compared, decider)
        assert found.differs and found.embeddings.p_value < 0.01
        assert found.median_scores[1] < found.median_scores[0]
        assert len(set(compared.guesses[0].tolist()) ^ set(compared.guesses[1].tolist())) == 0


def test_near_duplicates_count_once():
    decider, queries = drawn(0)
    twice = compare_images(decider, queries.repeat(2, 1), np.arange(2 * len(queries)) % len(queries))
    once = compare_images(decider, queries, np.arange(len(queries)))
    assert len(twice.scores[1]) == len(once.scores[1])


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize(("same_shares", "blur"), [(True, 0.0), (False, 0.005)])
def test_the_size_of_the_tests_is_5_percent(same_shares: bool, blur: float, monkeypatch: pytest.MonkeyPatch):
    """Within three standard errors, 1.5 % of 2 000 galleries. Other shares blur it where guesses are wrong."""
    monkeypatch.setattr(check, "PERMUTATIONS", 199)
    galleries = 2000 if FULL else 400
    chance = 3 * (0.05 * 0.95 / galleries) ** 0.5
    rejected = np.zeros((galleries, 2), bool)
    for seed in range(galleries):
        decider, queries = drawn(seed, same_shares=same_shares)
        compared = compare_images(decider, queries, np.arange(len(queries)), seed=seed)
        found = measure_difference(compared, decider, seed=seed)
        rejected[seed] = found.scores.p_value <= 0.05, found.embeddings.p_value <= 0.05
    assert (np.abs(rejected.mean(0) - 0.05) <= chance + blur).all(), rejected.mean(0)


@pytest.mark.slow
def test_a_gallery_is_checked(place: Path, tmp_path: Path, dmlkit: Callable[..., Result]):  # noqa: F811
    gallery, photos = tmp_path / "birds", tmp_path / "photos"
    for index in range(30):
        trees.photo(photos / f"bird{index % 3}" / f"{index}.jpg", index, (40, 30))
        trees.photo(tmp_path / "new" / f"{index}.jpg", 40 + index, (40, 30))
    create_gallery(place / "run", photos, gallery, model=ON_CPU)
    with pytest.raises(UserError, match="is not calibrated; run dmlkit calibrate"):
        check_queries(gallery, photos, model=ON_CPU)
    calibrate_gallery(gallery, fpir=0.5, near=-0.001, model=ON_CPU)
    words = ("gallery", "check", gallery, tmp_path / "new", "--device", "cpu")
    found = json.loads(dmlkit(*words, "--json").out)
    shown = dmlkit(*words).out
    assert 10 <= found["queries"] <= 30 and 10 <= found["images"] <= 15
    assert ("the new images differ" in shown) == found["differs"]
    assert f"{found['embeddings']['p_value']:.3f}" in shown
    assert load_gallery(gallery, device="cpu").check(tmp_path / "new").stamped() == found
    result = dmlkit("gallery", "check", gallery, tmp_path / "new" / "0.jpg", "--device", "cpu")
    assert result.code == 2 and "at least 10 of each are needed" in result.err
