"""Figures over all pairs against scikit-learn's curves and naive loops over the same scores."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score, roc_curve

from dmlkit.manifolds import Euclidean, Poincare, Sphere
from dmlkit.metrics import Labeled, TarAtFarConfig, metric_configs, pairing, retrieval_metrics, score_retrieval
from dmlkit.metrics import verification as curve
from dmlkit.metrics.base import Points
from dmlkit.metrics.verification import PairCurve

NAMES = ["eer", "roc_auc", "tar@far=1e-2", "tar@far=0.1", "tar@far=0.5"]


def naive(scores: list[float], same: list[bool]) -> dict[str, float]:
    """The figures by their definitions, at every threshold there is."""
    ours = [s for s, y in zip(scores, same, strict=True) if y]
    others = [s for s, y in zip(scores, same, strict=True) if not y]
    points = [(0.0, 0.0)]
    tar = dict.fromkeys((0.01, 0.1, 0.5), 0.0)
    for t in sorted(set(scores), reverse=True):
        accepted = sum(s >= t for s in others) / len(others), sum(s >= t for s in ours) / len(ours)
        points.append(accepted)
        for far in tar:
            if accepted[0] <= far:
                tar[far] = max(tar[far], accepted[1])
    eer = None
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 + y0 <= 1 <= x1 + y1 and eer is None:
            eer = x0 + (x1 - x0) * (1 - x0 - y0) / (x1 - x0 + y1 - y0)
    wins = sum((a > b) + (a == b) / 2 for a in ours for b in others)
    assert eer is not None
    return {
        "eer": eer,
        "roc_auc": wins / len(ours) / len(others),
        "tar@far=0.01": tar[0.01],
        "tar@far=0.1": tar[0.1],
        "tar@far=0.5": tar[0.5],
    }


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), min_size=2, max_size=9))
def test_ties_and_duplicates_against_naive_loops(items):
    labels = [y for _, y in items]
    if len(set(labels)) in (1, len(labels)):
        return
    pairs = list(combinations(items, 2))
    scores, same = [-abs(a[0] - b[0]) for a, b in pairs], [a[1] == b[1] for a, b in pairs]
    ours = score_retrieval(Labeled([[float(x)] for x, _ in items], labels), manifold=Euclidean(1), metrics=NAMES)
    assert ours.values == pytest.approx(naive(scores, same), abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), min_size=1, max_size=6),
    st.integers(0, 6),
)
def test_queries_and_a_gallery_against_naive_loops(queries, gallery, shared):
    """The first ``shared`` queries are in the gallery as well, in another order, and are no pair with themselves."""
    shared = min(shared, len(queries))
    items = gallery + queries[:shared][::-1]
    ids, item_ids = list(range(len(queries))), [*range(100, 100 + len(gallery)), *reversed(range(shared))]
    pairs = [(a, b) for a, i in zip(queries, ids, strict=True) for b, j in zip(items, item_ids, strict=True) if i != j]
    same = [a[1] == b[1] for a, b in pairs]
    arrays = [
        torch.tensor([[float(x)] for x, _ in queries]), [y for _, y in queries],
        torch.tensor([[float(x)] for x, _ in items]), [y for _, y in items],
    ]  # fmt: skip
    if len({*arrays[1], *arrays[3]}) == 1 or not any(same):
        return
    if all(same):
        with pytest.raises(ValueError, match="metrics over pairs need both"):
            retrieval_metrics(*arrays, Euclidean(1), NAMES, ids=(ids, item_ids))
        return
    ours = score_retrieval(Labeled(*arrays[:2], ids), Labeled(*arrays[2:], item_ids), Euclidean(1), NAMES)
    assert ours.values == pytest.approx(naive([-abs(a[0] - b[0]) for a, b in pairs], same), abs=1e-12)


def clusters(count: int = 240, classes: int = 11, width: int = 6, noise: float = 0.8):
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(classes, (count,), generator=generator)
    centres = torch.randn(classes, width, generator=generator)
    return centres[labels] + noise * torch.randn(count, width, generator=generator), labels


@pytest.mark.parametrize(
    "manifold",
    [Sphere(6), Euclidean(6, similarity="dot"), Euclidean(6, similarity="negative_squared_distance"), Poincare(6)],
    ids=lambda manifold: f"{type(manifold).__name__}-{manifold.similarity_name}",
)
def test_against_scikit_learn_on_every_manifold(manifold):
    features, labels = clusters()
    points = manifold.from_features(features).detach()
    figures = retrieval_metrics(points, labels, manifold=manifold, metrics=NAMES)
    i, j = torch.triu_indices(len(labels), len(labels), 1)
    scores = manifold.paired_similarity(points[i].double(), points[j].double()).detach().numpy()
    same = (labels[i] == labels[j]).numpy()
    fpr, tpr, _ = roc_curve(same, scores, drop_intermediate=False)
    assert figures["roc_auc"] == pytest.approx(roc_auc_score(same, scores), abs=1e-6)
    assert figures["tar@far=0.1"] == pytest.approx(tpr[fpr <= 0.1].max(), abs=1e-3)
    assert np.interp(figures["eer"], fpr, tpr) == pytest.approx(1 - figures["eer"], abs=1e-3)


def test_the_result_does_not_depend_on_blocks_and_bands(monkeypatch: pytest.MonkeyPatch):
    features, labels = clusters(count=200)
    points = torch.nn.functional.normalize(features, dim=1)
    whole = retrieval_metrics(points, labels, metrics=NAMES)
    monkeypatch.setattr(pairing, "BLOCK_ENTRIES", 3000)
    monkeypatch.setattr(pairing, "DISTANCE_ENTRIES", 1777)
    monkeypatch.setattr(curve, "SORTED_ENTRIES", 300)
    assert retrieval_metrics(points, labels, metrics=NAMES) == pytest.approx(whole, abs=1e-5)
    monkeypatch.setattr(curve, "BAND_SCORES", 200)
    found = PairCurve.of(Points(points, labels, Sphere(6)))
    bands = list(found.bands())
    assert len(bands) > 5 and not found.kept
    assert sum(int(band.count.sum()) for band in bands) == found.same
    assert all(band.scores[0] > band.scores[-1] for band in bands if len(band.scores) > 1)
    assert retrieval_metrics(points, labels, metrics=NAMES) == pytest.approx(whole, abs=1e-5)


def test_a_band_that_ends_at_zero_has_all_its_scores(monkeypatch: pytest.MonkeyPatch):
    """Points on the axes have scores of exactly 1, 0 and -1, so many of 0 that they are a band of their own."""
    points, labels = torch.cat([torch.eye(3), -torch.eye(3)]).repeat(4, 1), torch.arange(24) // 12
    monkeypatch.setattr(curve, "BAND_SCORES", 20)
    found: dict[float, int] = {}
    for band in PairCurve.of(Points(points, labels, Sphere(3))).bands():
        found |= dict(zip(band.scores.tolist(), band.count.tolist(), strict=True))
    pairs = [(points[i] @ points[j]).item() for i, j in combinations(range(24), 2) if labels[i] == labels[j]]
    assert found == {score: pairs.count(score) for score in (1.0, 0.0, -1.0)}


def test_repeated_points_tie_wherever_they_stand():
    """Four points, each many times under mixed labels: only four by four scores are distinct."""
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(4, (300,), generator=generator)
    points = torch.nn.functional.normalize(torch.randn(4, 33, generator=generator), dim=1)[places]
    labels = torch.randint(3, (300,), generator=generator)
    i, j = torch.triu_indices(300, 300, 1)
    table = (points[:, None].double() * points.double()).sum(2).float()
    theirs = roc_auc_score((labels[i] == labels[j]).numpy(), table[i, j].numpy())
    ours = retrieval_metrics(points, labels, manifold=Sphere(33), metrics=["roc_auc"])
    assert ours["roc_auc"] == pytest.approx(theirs, abs=1e-12)
    (band,) = PairCurve.of(Points(points, labels, Sphere(33))).bands()
    assert len(band.scores) <= 10
    collapsed = retrieval_metrics(points[:1].expand(300, -1), labels, metrics=["roc_auc", "eer"])
    assert collapsed == {"roc_auc": 0.5, "eer": 0.5}


def test_a_share_that_no_pair_can_have_is_told():
    features, labels = clusters(count=30)
    scores = score_retrieval(Labeled(torch.nn.functional.normalize(features, dim=1), labels), metrics=["tar@far=1e-6"])
    assert any("pairs of different classes may be accepted" in note for note in scores.notes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tar@far=2", "less than 1"),
        ("tar@far=0", "greater than 0"),
        ("tar@far=nan", "'tar@far=nan'"),
        ("tar@far=often", "expected a number after '='"),
        ("tar@x=1", "unknown metric"),
        ("eer@far=1e-3", "unknown metric"),
        ("tar@1", "unknown metric"),
    ],
)
def test_names_that_are_none(name, message):
    with pytest.raises(ValueError, match=message):
        metric_configs([name])


def test_names_of_one_metric_are_told_as_they_are_asked():
    assert metric_configs(["tar@far=0.001"]) == [TarAtFarConfig(far=(1e-3,))]
    assert TarAtFarConfig(far=(1e-3, 0.05, 2.5e-5)).names() == ("tar@far=1e-3", "tar@far=0.05", "tar@far=2.5e-5")
