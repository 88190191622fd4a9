"""Calibration of pairs: thresholds and intervals against loops and other classes, probabilities against sklearn."""

import json
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats
from sklearn.linear_model import LogisticRegression

from dmlkit.evaluation import calibration
from dmlkit.evaluation.calibration import (
    best_pairs,
    calibrate_pairs,
    far_interval,
    fit_pair_probability,
    plot_reliability,
    probability_at,
    rates_at,
    sampled_pairs,
)
from dmlkit.evaluation.rates_by_value import rates_of_images
from dmlkit.identify.probability import Trials
from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.metrics import reliability
from dmlkit.metrics.base import Points
from dmlkit.metrics.pairing import Pairing
from dmlkit.metrics.reliability import measure_reliability
from dmlkit.run_folder.threshold import Threshold
from dmlkit.vectors.points import PointsInMemory


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of intervals, whose ends no test here looks at: 1 000 draws of 20 000 pairs take a second."""
    monkeypatch.setattr(reliability, "RESAMPLES", 20)


def clusters(classes: int, seed: int, width: int = 12) -> Points:
    """Unequal classes, some of them easily confused."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 20, (classes,), generator=generator)
    labels = torch.arange(classes).repeat_interleave(sizes)
    kinds = torch.randn(max(2, classes // 5), width, generator=generator)
    centres = kinds[torch.randint(len(kinds), (classes,), generator=generator)]
    centres = centres + torch.randn(classes, width, generator=generator)
    features = centres[labels] + 0.7 * torch.randn(len(labels), width, generator=generator)
    return Points(torch.nn.functional.normalize(features, dim=1), labels, Sphere(width))


@pytest.mark.parametrize("far", [0.003, 0.29])
def test_the_threshold_is_the_lowest_that_the_rate_allows(far: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "RESAMPLES", 200)
    points = clusters(12, seed=4)
    found = calibrate_pairs(Pairing.of(points), far)
    scores = (points.embeddings @ points.embeddings.T).tolist()
    labels = points.labels.tolist()
    same, different = [], []
    for i, j in combinations(range(len(labels)), 2):
        (same if labels[i] == labels[j] else different).append(scores[i][j])
    reached = sum(score >= found.threshold - 1e-6 for score in different)
    assert found.rates.far == pytest.approx(reached / len(different), abs=1.5 / len(different))
    assert found.rates.far <= far < found.rates.far + 1.5 / len(different)
    frr = sum(score < found.threshold for score in same) / len(same)
    assert found.rates.frr == pytest.approx(frr, abs=1.5 / len(same))
    assert (found.rates.same, found.rates.different) == (len(same), len(different))
    low, high = found.interval
    assert 0 <= low < far < high <= 1


def test_images_of_one_group_form_no_pair(monkeypatch: pytest.MonkeyPatch):
    """Neither pairs of one class, such as two images of a burst, nor those of two classes before one camera."""
    from dmlkit.metrics import pairing

    monkeypatch.setattr(pairing, "BLOCK_ENTRIES", 500)
    points = clusters(9, seed=6)
    groups = torch.randint(7, (len(points.labels),), generator=torch.Generator().manual_seed(0))
    points = replace(points, groups=groups)
    pairs = [(i, j) for i, j in combinations(range(len(groups)), 2) if groups[i] != groups[j]]
    is_same = np.array([bool(points.labels[i] == points.labels[j]) for i, j in pairs])
    scores = np.array([float(points.embeddings[i] @ points.embeddings[j]) for i, j in pairs])
    table = points.embeddings @ points.embeddings.T
    for whole in (Pairing.of(points), Pairing.of_table(table, points.labels, groups)):
        found = calibrate_pairs(whole, 0.05)
        assert (found.rates.same, found.rates.different) == (is_same.sum(), (~is_same).sum())
        reached = scores >= found.threshold
        assert found.rates.far == pytest.approx(reached[~is_same].mean(), abs=1.5 / (~is_same).sum())
        assert found.rates.far <= 0.05 < found.rates.far + 1.5 / (~is_same).sum()
        assert found.rates.frr == pytest.approx(1 - reached[is_same].mean(), abs=1.5 / is_same.sum())
    drawn = zip(*(side.tolist() for side in sampled_pairs(points.labels, groups)), strict=True)
    assert {tuple(sorted(pair)) for pair in drawn} == {*pairs}
    in_memory = PointsInMemory("points", points.manifold, points.embeddings, [""] * len(groups), [""] * len(groups))
    rates = rates_of_images(in_memory, points.labels, groups, 0.3)
    for row in range(0, len(groups), 5):
        own = np.array([row in pair for pair in pairs])
        for name, kind, errors in (("far", ~is_same, scores >= 0.3), ("frr", is_same, scores < 0.3)):
            assert float(rates[name][row]) == pytest.approx(errors[own & kind].mean())


def test_rates_of_images_far_from_the_origin():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)) + 1000
    labels = torch.arange(40) % 5
    in_memory = PointsInMemory("points", Euclidean(4), x, [""] * 40, [""] * 40)
    rates = rates_of_images(in_memory, labels, torch.arange(40), -2.5)
    is_near = np.linalg.norm(x.double().numpy()[:, None] - x.double().numpy(), axis=2) <= 2.5
    is_other = labels.numpy()[:, None] != labels.numpy()
    np.testing.assert_allclose(rates["far"], (is_near & is_other).sum(1) / is_other.sum(1))
    np.testing.assert_allclose(rates["frr"], (~is_near & ~is_other).sum(1) / 7)


def test_equal_scores_are_rejected_together():
    """Twelve pairs of different classes at the same distance: accepting one would accept all."""
    line = torch.tensor([[0.0], [0.0], [0.0], [1.0], [1.0], [1.0], [9.0], [9.0]])
    points = Points(line, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]), Euclidean(1))
    found = calibrate_pairs(Pairing.of(points), 0.5)  # 21 pairs: 9 at distance 1, then 6 at 8 and 6 at 9
    assert found.threshold > -8 and found.rates.far == pytest.approx(9 / 21)


def test_the_best_pairs_are_those_of_a_sort(monkeypatch: pytest.MonkeyPatch):
    from dmlkit.metrics import pairing

    points = clusters(9, seed=1)
    whole = Pairing.of(points)
    scores = points.embeddings @ points.embeddings.T
    kept = (points.labels[:, None] < points.labels).nonzero()
    order = scores[kept[:, 0], kept[:, 1]].sort(descending=True)
    monkeypatch.setattr(pairing, "BLOCK_ENTRIES", 500)
    best, classes = best_pairs(whole, 70)
    assert torch.allclose(best, order.values[:70], atol=1e-6)
    theirs = points.labels[kept[order.indices[:70]]]
    assert sorted(map(tuple, classes.T.tolist())) == sorted(map(tuple, theirs.tolist()))


def test_the_interval_of_draws_is_that_of_a_loop(monkeypatch: pytest.MonkeyPatch):
    """Each draw scored anew from the images of the classes that were drawn, copies apart."""
    monkeypatch.setattr(calibration, "RESAMPLES", 40)
    points, far = clusters(6, seed=2), 0.05
    whole = Pairing.of(points)
    sizes, best = points.labels.bincount().double(), best_pairs(whole, whole.different)[1]
    found = far_interval(best, sizes, far, whole.different, seed=7)
    generator, rates = torch.Generator().manual_seed(7), []
    members = [points.embeddings[points.labels == label] for label in range(6)]

    def drawn() -> torch.Tensor:
        while True:
            draw = torch.randint(6, (6,), generator=generator).tolist()
            if len(set(draw)) > 1:
                pairs = [(a, b) for a, b in combinations(draw, 2) if a != b]
                return torch.cat([(members[a] @ members[b].T).flatten() for a, b in pairs])

    for _ in range(40):
        first, second = drawn().sort(descending=True).values, drawn()
        rates.append(float((second > first[int(far * len(first))]).double().mean()))
    # a class of an accepted pair counts as often as there are accepted pairs of it (Kish), and the tails are Student's
    similarities = points.embeddings @ points.embeddings.T
    kept = (points.labels[:, None] < points.labels).nonzero()
    order = similarities[kept[:, 0], kept[:, 1]].argsort(descending=True)[: round(far * whole.different)]
    times = np.bincount(points.labels[kept[order]].flatten().numpy())
    count = times.sum() ** 2 / (times**2).sum()
    tail = stats.norm.cdf(stats.t.ppf(0.025, count - 1) * np.sqrt(count / (count - 1)))
    low, high = torch.tensor(rates).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float32)).tolist()
    assert found == pytest.approx((low, high), abs=0.01)
    # the ends are shares of the pairs that there are, fewer where groups hide some: of three times as many, a third
    third = far_interval(best, sizes, far / 3, 3 * whole.different, seed=7)
    assert third == pytest.approx((found[0] / 3, found[1] / 3))


@pytest.mark.parametrize(("classes", "far"), [(25, 0.01), (5, 0.05)])
def test_the_interval_holds_what_other_classes_show(classes: int, far: float, monkeypatch: pytest.MonkeyPatch):
    """Nominally 95 %: 7 or fewer of 10 would be chance once in 90 times."""
    monkeypatch.setattr(calibration, "RESAMPLES", 200)
    held = 0
    for seed in range(10):
        points = clusters(2 * classes, seed=100 + seed)
        sides = [points.labels % 2 == parity for parity in (0, 1)]
        first, second = (
            Points(points.embeddings[kept], points.labels[kept].unique(return_inverse=True)[1], points.manifold)
            for kept in sides
        )
        found = calibrate_pairs(Pairing.of(first), far)
        assert found.interval is not None
        low, high = found.interval
        held += low <= rates_at(Pairing.of(second), found.threshold).far <= high
    assert held >= 8


def test_too_few_classes_have_no_interval_and_too_few_pairs_are_told():
    """Of 2 classes every draw is the same, so that the interval had no width: it held 0 of 60 simulated rates."""
    found = calibrate_pairs(Pairing.of(clusters(4, seed=3)), 0.3)
    assert found.interval is None and 0 < found.rates.far <= 0.3
    points = clusters(6, seed=0)
    with pytest.raises(ValueError, match=r"too few for a false accept rate of 1e-05: at least 1,000,000 are needed"):
        calibrate_pairs(Pairing.of(points), 1e-5)
    with pytest.raises(ValueError, match=r"rate of 3e-12: at least 3\.3e\+12 are needed"):
        calibrate_pairs(Pairing.of(points), 3e-12)
    with pytest.raises(ValueError, match=r"rate of 1e-300: at least 1e\+301 are needed") as raised:
        calibrate_pairs(Pairing.of(points), 1e-300)
    assert len(str(raised.value)) < 250
    least = float(re.findall(r"use --far (\S+) or more,", str(raised.value))[0])
    assert least == pytest.approx(10 / Pairing.of(points).different, rel=0.05)
    with pytest.raises(ValueError, match="at least inf are needed"):
        calibrate_pairs(Pairing.of(points), 5e-324)
    single = Points(torch.eye(40), torch.arange(40), Sphere(40))
    with pytest.raises(ValueError, match="no class has two images"):
        calibrate_pairs(Pairing.of(single), 0.1)


@pytest.fixture(scope="module")
def run(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(trained_run, tmp_path_factory.mktemp("calibration") / "run"))


def test_a_run_keeps_its_threshold_and_embed_and_export_carry_it(dmlkit, run: Path, tmp_path: Path):
    dmlkit("verify", run, run / "recipe.yaml", run / "recipe.yaml").refused(
        "no threshold for the best checkpoint; choose one with dmlkit calibrate"
    )
    result = dmlkit("calibrate", run, "--far", "0.1")
    assert result.code == 0 and "different pairs" in result.out
    shown = " ".join(result.out.split())
    assert "it needs at least 5 validation classes, got 3" in shown
    assert "note: 3 classes cannot carry a FAR of 0.1: they are 3 pairs of classes, and the least is 1 / 3" in shown
    threshold = Threshold.read(run / "threshold.json")
    assert (threshold.validation.classes, threshold.validation.images) == (3, 18)
    assert (threshold.validation.same, threshold.validation.different) == (45, 108)
    assert threshold.test is not None and threshold.test.different == 15 * 36 and threshold.validation.far <= 0.1
    enough = re.search(r"use --far (\S+), or more classes", shown)
    assert enough and "cannot carry" not in dmlkit("calibrate", run, "--far", enough[1]).out
    answer = dmlkit("calibrate", run, "--far", "0.1", "--json").json()
    assert answer["threshold"] == threshold.threshold and answer["far_interval"] is None
    lowest = dmlkit("calibrate", run)  # 108 pairs do not allow 0.001
    assert lowest.code == 0 and "requested FAR: 0.093, the lowest that 108 pairs" in " ".join(lowest.out.split())
    assert int(0.092 * 108) < 10 <= Threshold.read(run / "threshold.json").far * 108
    assert dmlkit("calibrate", run, "--far", "0.1").code == 0
    assert dmlkit("embed", run, "--split", "test", "-o", tmp_path / "e").code == 0
    carried = json.loads((tmp_path / "e" / "manifest.json").read_text())["threshold"]
    assert carried["threshold"] == threshold.threshold and carried["weights"] == threshold.weights
    assert dmlkit("export", run, "--format", "safetensors", "-o", tmp_path / "m.safetensors").code == 0
    assert json.loads((tmp_path / "m.safetensors.json").read_text())["threshold"]["far"] == 0.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--far", "1e-3"], "108 pairs of different classes are too few"),
        (["--far", "0"], "--far 0: expected a share between 0 and 1"),
        (["--far", "nan"], "--far nan: expected a share between 0 and 1"),
        (["--set", "loss.margin=1"], "expected a key of the dataset"),
        (["--set", "dataset.validation_fraction=0"], "dataset.validation_fraction"),
    ],
)
def test_what_cannot_be_calibrated(dmlkit, run: Path, words: list[str], message: str):
    dmlkit("calibrate", run, *words).refused(message)


def test_weights_with_nan_are_told_in_one_line(dmlkit, run: Path, tmp_path: Path):
    broken = Path(shutil.copytree(run, tmp_path / "run"))
    for path in (broken / "checkpoints").glob("*.pt"):
        state = torch.load(path, weights_only=True)
        [value for value in state["model"].values() if value.is_floating_point()][-1].fill_(torch.nan)
        torch.save(state, path)
    for words in (["calibrate", broken, "--far", "0.5"], ["eval", broken], ["cluster", broken, "-k", "2"]):
        dmlkit(*words).refused("its embedding has nan or inf; the training diverged")


@pytest.mark.parametrize("classes", [20, 3])
def test_bins_and_their_intervals_are_drawn(classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    generator = np.random.default_rng(0)
    said = generator.random(400)
    measured = measure_reliability(said, generator.random(400) < said, said < 0, np.arange(400) % classes)
    figure = Figure()

    @contextmanager
    def captured(path: Path, height: float):
        yield figure

    monkeypatch.setattr(calibration, "picture", captured)
    plot_reliability(measured, tmp_path / "a.png", title="Pairs", share="share of the same class")
    (axes,) = figure.axes
    (bars,) = axes.containers
    line, _, (stems,) = bars
    assert np.array(line.get_xydata()) == pytest.approx(
        np.array([(one.probability, one.share) for one in measured.bins])
    )
    ends = [one.interval or (one.share, one.share) for one in measured.bins]
    assert np.array(stems.get_segments())[:, :, 1] == pytest.approx(np.array(ends))
    assert axes.get_title().startswith("Pairs\n") and f"calibration error {measured.error:.3f}" in axes.get_title()
    assert axes.get_ylabel() == "share of the same class"
    legend = figure.legends[0].get_texts()[1].get_text()
    assert ("95 % interval" in legend) == (" to " in axes.get_title()) == (classes == 20)


def pairs_of(points: Points) -> tuple[np.ndarray, np.ndarray]:
    """Scores and classes of all pairs."""
    x, labels = points.embeddings.double().numpy(), points.labels.tolist()
    pairs = list(combinations(range(len(labels)), 2))
    return np.array([x[i] @ x[j] for i, j in pairs]), np.array([(labels[i], labels[j]) for i, j in pairs])


def platt(scores: np.ndarray, same: np.ndarray) -> LogisticRegression:
    """Logistic regression in which both kinds of pairs have the same weight, with Platt's targets as two rows each."""
    targets = np.where(same, (same.sum() + 1) / (same.sum() + 2), 1 / ((~same).sum() + 2))
    weights = len(same) / 2 / np.where(same, same.sum(), (~same).sum())
    both = np.concatenate([weights * targets, weights * (1 - targets)])
    twice = np.repeat([1, 0], len(same))
    return LogisticRegression(C=1e8, tol=1e-10).fit(np.tile(scores, 2)[:, None], twice, sample_weight=both)


def test_the_fit_is_that_of_balanced_logistic_regression():
    points = clusters(8, seed=2)
    found = fit_pair_probability(points)
    scores, classes = pairs_of(points)
    same = classes[:, 0] == classes[:, 1]
    model = platt(scores, same)
    for score in (-0.5, 0.2, 0.6, 0.9):
        expected = model.predict_proba([[score]])[0, 1]
        assert probability_at(score, found) == pytest.approx(expected, abs=1e-4)
        odds = expected / (1 - expected) * 0.02 / 0.98  # Bayes' rule
        assert probability_at(score, found, prior=0.02) == pytest.approx(odds / (1 + odds), abs=1e-4)


def test_pairs_are_drawn_evenly(monkeypatch: pytest.MonkeyPatch):
    labels = torch.from_numpy(np.random.default_rng(0).integers(5, size=60))
    kinds = {kind: [pair for pair in combinations(range(60), 2) if (labels[pair[0]] == labels[pair[1]]) == kind]
             for kind in (True, False)}  # fmt: skip
    first, second = sampled_pairs(labels)
    found = {tuple(sorted(pair)) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    assert found == {*kinds[True], *kinds[False]} and len(first) == len(found)
    monkeypatch.setattr(calibration, "MOST", 300)
    first, second = sampled_pairs(labels)
    found = {tuple(sorted(pair)) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    same = labels[first] == labels[second]
    assert len(found) == 600 and same.sum() == 300
    # the share of draws with an image of the first half is that of all pairs, within 4 deviations
    for kind, own in ((True, same), (False, ~same)):
        expected = np.mean([i < 30 for pair in kinds[kind] for i in pair])
        drawn = torch.cat([first[own], second[own]])
        assert float((drawn < 30).double().mean()) == pytest.approx(expected, abs=4 * np.sqrt(0.25 / 600))


def test_reliability_is_of_pairs_whose_classes_did_not_fit():
    scores, classes = pairs_of(clusters(10, seed=5))
    same, nothing = classes[:, 0] == classes[:, 1], np.zeros(len(scores))
    trials = Trials(nothing, scores, same, ~same, classes, classes)
    found = trials.reliability()
    assert found.error_interval is not None
    folds = np.random.default_rng(0).permutation(10) % 5
    said = np.empty(len(scores))
    for row, (a, b) in enumerate(classes):
        if row % 293:
            continue
        kept = [p for p, pair in enumerate(classes) if not {folds[a], folds[b]} & {folds[pair[0]], folds[pair[1]]}]
        model = platt(scores[kept], classes[kept, 0] == classes[kept, 1])
        said[row] = model.predict_proba(scores[row : row + 1, None])[0, 1]
    rows = np.arange(0, len(scores), 293)
    fitted = trials.held_out_probabilities()
    assert fitted[rows] == pytest.approx(said[rows], abs=1e-4)
    weights = np.where(same, 0.5 / same.sum(), 0.5 / (~same).sum())
    assert found.brier == pytest.approx(weights @ (fitted - same) ** 2)
    assert fit_pair_probability(clusters(4, seed=5)).reliability is None


def test_probabilities_hold_for_pairs_of_other_classes():
    errors = []
    for seed in range(4):
        points = clusters(40, seed=200 + seed)
        sides = [
            Points(points.embeddings[kept], points.labels[kept].unique(return_inverse=True)[1], points.manifold)
            for kept in (points.labels < 20, points.labels >= 20)
        ]
        fitted = fit_pair_probability(sides[0])
        scores, classes = pairs_of(sides[1])
        same = classes[:, 0] == classes[:, 1]
        said = np.array([probability_at(score, fitted) for score in scores[::7]])
        same, weights = same[::7], np.where(same, 0.5 / same.sum(), 0.5 / (~same).sum())[::7]
        weights /= weights.sum()
        for low, high in ((0, 0.2), (0.2, 0.8), (0.8, 1.01)):
            own = (said >= low) & (said < high)
            errors.append((weights[own] @ said[own] - weights[own] @ same[own]) / weights[own].sum())
        assert fitted.reliability is not None and fitted.reliability.error < 0.1
    assert np.abs(np.reshape(errors, (4, 3)).mean(0)).max() < 0.1
