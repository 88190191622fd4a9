"""Re-ranking against NumPy loops written from the papers' equations."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dmlkit.manifolds import Euclidean, Poincare, Product, Sphere
from dmlkit.metrics import Labeled, metrics_from_hits, score_retrieval
from dmlkit.metrics.ranking import rerank
from dmlkit.metrics.ranking.rerank import (
    ExpandedGallery,
    Expansion,
    KReciprocal,
    ReciprocalGallery,
    check_rerank,
    parse_rerank,
)
from tests.conftest import Cli


def points_on(name: str, count: int, seed: int) -> tuple:
    manifold = {"sphere": Sphere, "euclidean": Euclidean, "poincare": Poincare}[name](4)
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    features = centers[torch.arange(count) % 5] + 0.5 * torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return manifold, manifold.from_features(0.5 * features)


def reciprocal(i: int, order: list[list[int]], k: int) -> set[int]:
    return {j for j in order[i][: k + 1] if i in order[j][: k + 1]}


def expanded(own: set[int], order: list[list[int]], k1: int) -> set[int]:
    found = own
    for j in own:
        half = reciprocal(j, order, (k1 + 1) // 2)
        if len(own & half) >= 2 / 3 * len(half):
            found = found | half
    return found


def raw_weights(similarity: np.ndarray, order: list[list[int]], k1: int) -> np.ndarray:
    """Weights of all images on all others, before they are averaged."""
    low, high = similarity.min(1, keepdims=True), similarity.max(1, keepdims=True)
    weights = np.zeros_like(similarity)
    for i in range(len(similarity)):
        for j in expanded(reciprocal(i, order, k1), order, k1):
            weights[i, j] = np.exp(-((high - similarity) / (high - low))[i, j])
    return weights


def naive_k_reciprocal(similarity: np.ndarray, k1: int, k2: int, weight: float) -> np.ndarray:
    """Final distances of all pairs, with sets of Python."""
    size = len(similarity)
    low, high = similarity.min(1, keepdims=True), similarity.max(1, keepdims=True)
    d = (high - similarity) / (high - low)
    order = [sorted(range(size), key=lambda j, i=i: (j != i, -similarity[i, j])) for i in range(size)]
    weights = raw_weights(similarity, order, k1)
    weights = np.array([np.mean([weights[j] for j in order[i][:k2]], axis=0) for i in range(size)])
    final = np.empty((size, size))
    for i in range(size):
        for j in range(size):
            jaccard = 1 - np.minimum(weights[i], weights[j]).sum() / np.maximum(weights[i], weights[j]).sum()
            final[i, j] = (1 - weight) * jaccard + weight * d[i, j]
    return final


@pytest.mark.parametrize(("name", "k1", "k2"), [("sphere", 7, 3), ("poincare", 6, 1)])
def test_k_reciprocal(name: str, k1: int, k2: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rerank, "BLOCK_ENTRIES", 40 * 7)  # blocks of 7 images
    manifold, points = points_on(name, 40, 1)
    expected = naive_k_reciprocal(manifold.similarity(points, points).numpy(), k1, k2, 0.3)
    prepared = ReciprocalGallery(manifold, points, KReciprocal(k1, k2, 0.3))
    assert np.abs(prepared.own_scores(torch.arange(40)).numpy() + expected).max() < 1e-6
    assert np.abs(prepared.own_scores(torch.tensor([3, 7])).numpy() + expected[[3, 7]]).max() < 1e-6


@pytest.mark.parametrize(("name", "k1", "k2"), [("euclidean", 7, 3), ("poincare", 6, 1)])
def test_k_reciprocal_of_the_gallery_alone(name: str, k1: int, k2: int, monkeypatch: pytest.MonkeyPatch):
    """Against sets of Python, one query at a time."""
    monkeypatch.setattr(rerank, "BLOCK_ENTRIES", 30 * 7)
    manifold, points = points_on(name, 40, 1)
    queries, gallery = points[:10], points[10:]
    compared: list[int] = []
    prepared = ReciprocalGallery(manifold, gallery, KReciprocal(k1, k2, 0.3), compared.append)
    assert sum(compared) == 30
    among = manifold.similarity(gallery, gallery).numpy()
    order = [sorted(range(30), key=lambda j, i=i: (j != i, -among[i, j])) for i in range(30)]
    weights = raw_weights(among, order, k1)
    averages = np.array([np.mean([weights[j] for j in order[i][:k2]], axis=0) for i in range(30)])
    found = prepared.scores(queries).numpy()
    for query, scores in zip(queries, found, strict=True):
        s = manifold.similarity(query[None], gallery)[0].numpy()
        high = max(s.max(), float(manifold.similarity(query[None], query[None])))
        d = (high - s) / (high - s.min())
        near = list(np.argsort(-s)[:k1])
        own = {j for j in near if s[j] >= among[j, order[j][k1]]}
        own = expanded(own, order, k1)
        weight = np.array([np.exp(-d[j]) if j in own else 0 for j in range(30)])
        weight = np.mean([weight, *(weights[j] for j in near[: k2 - 1])], axis=0)
        for j in range(30):
            jaccard = 1 - np.minimum(weight, averages[j]).sum() / np.maximum(weight, averages[j]).sum()
            assert scores[j] == pytest.approx(-0.7 * jaccard - 0.3 * d[j], abs=1e-6)
    assert np.abs(prepared.scores(queries[4:5]).numpy() - found[4]).max() < 1e-12  # alone, without other queries


def test_distances_far_from_the_origin():
    """Against sets of Python and distances in NumPy; products of float32 would have no digit left."""
    x = (points_on("euclidean", 40, 1)[1] + 1000).float()
    apart = np.linalg.norm(x.double().numpy()[:, None] - x.double().numpy(), axis=2)
    prepared = ReciprocalGallery(Euclidean(4), x, KReciprocal(7, 3, 0.3))
    expected = naive_k_reciprocal(-apart, 7, 3, 0.3)
    assert np.abs(prepared.own_scores(torch.arange(40)).numpy() + expected).max() < 1e-5
    nearest = np.argsort(apart + np.diag([np.inf] * 40))[:, :3]
    means = (x.numpy() + x.numpy()[nearest].sum(1)) / 4
    assert np.abs(ExpandedGallery(Euclidean(4), x, Expansion(3, 0)).points.numpy() - means).max() < 1e-3


def test_equal_points_can_be_re_ranked():
    points = torch.ones(8, 2)
    gallery = ReciprocalGallery(Euclidean(2), points, KReciprocal(3, 2, 0.3))
    scores = gallery.scores(points[:1])  # the distance adds nothing, and which sets they share depends on the order
    assert scores.min() >= -0.7 and scores.max() <= 0


def test_expansion_on_the_sphere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rerank, "BLOCK_ENTRIES", 40 * 7)  # blocks of 7 images
    manifold, points = points_on("sphere", 40, 2)
    x = points.numpy()

    def naive(one: np.ndarray, others: np.ndarray) -> np.ndarray:
        cosines = others @ one
        nearest = np.argsort(-cosines)[:5]
        total = one + sum(max(cosines[j], 0) ** 3 * others[j] for j in nearest)
        return total / np.linalg.norm(total)

    among = ExpandedGallery(manifold, points, Expansion(5, 3)).points
    expected = np.array([naive(x[i], np.delete(x, i, 0)) for i in range(40)])
    assert np.abs(among.numpy() - expected).max() < 1e-6
    gallery = ExpandedGallery(manifold, points[10:], Expansion(5, 3))
    queries = gallery.expanded(points[:10])
    assert np.abs(gallery.expanded(points[4:5]).numpy() - queries[4].numpy()).max() < 1e-12
    assert np.abs(queries.numpy() - [naive(one, x[10:]) for one in x[:10]]).max() < 1e-6
    expected = np.array([naive(x[i], np.delete(x[10:], i - 10, 0)) for i in range(10, 40)])
    assert np.abs(gallery.points.numpy() - expected).max() < 1e-6


def test_copies_can_be_expanded_by_any_power():
    """The cosine of copies rounds to more than 1. Of a power this high only copies count, so that each image stays."""
    points = torch.nn.functional.normalize(torch.randn(80, 12, generator=torch.Generator().manual_seed(0)), dim=1)
    copies = torch.cat([points, points])
    expanded = ExpandedGallery(Sphere(12), copies, Expansion(n=3, alpha=1e12)).points
    assert torch.allclose(expanded, copies, atol=1e-6)


def test_expansion_stays_on_the_ball():
    manifold, points = points_on("poincare", 40, 3)
    assert float(manifold.distance_off(ExpandedGallery(manifold, points, Expansion()).points).max()) < 1e-9


@pytest.mark.parametrize("method", [KReciprocal(6, 3, 0.3), Expansion(3, 3)])
def test_metrics_after_re_ranking(method: rerank.Rerank):
    """Metrics of the re-ranked similarities, with each query among all others, a gallery, and itself as gallery."""
    manifold, points = points_on("sphere", 40, 4)
    labels = torch.arange(40) % 5
    scores = score_retrieval(Labeled(points, labels), manifold=manifold, metrics=["map@r"], rerank=method)
    if isinstance(method, KReciprocal):
        similarity = -naive_k_reciprocal(manifold.similarity(points, points).numpy(), *method)
    else:
        expanded = ExpandedGallery(manifold, points, method).points
        similarity = manifold.similarity(expanded, expanded).numpy()
    np.fill_diagonal(similarity, -np.inf)
    hits = (labels[:, None] == labels)[torch.arange(40)[:, None], torch.from_numpy(-similarity).argsort(1)][:, :39]
    expected = metrics_from_hits(hits, torch.full((40,), 7), ["map@r"])
    assert scores.values == pytest.approx(expected)
    assert scores.values != score_retrieval(Labeled(points, labels), manifold=manifold, metrics=["map@r"]).values
    same = Labeled(points, labels, torch.arange(40))
    assert score_retrieval(same, same, manifold, ["map@r"], rerank=method).values == pytest.approx(expected)
    queries, gallery = Labeled(points[:10], labels[:10]), Labeled(points[10:], labels[10:])
    apart = score_retrieval(queries, gallery, manifold, ["map@r"], rerank=method)
    alone = score_retrieval(Labeled(points[3:4], labels[3:4]), gallery, manifold, ["map@r"], rerank=method)
    assert alone.per_query["map@r"][0] == apart.per_query["map@r"][3]  # no query affects another


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expansion:k1=3", "expansion has no option 'k1'"),
        ("k_reciprocal:wieght=0.3", "did you mean 'weight'"),
        ("k_reciprocal:k1=2.5", "k1: expected a whole number, got '2.5'"),
        ("k_reciprocal:k1=8,k1=9", "k1: given twice"),
        ("k_reciprocal:k2=30", "k2: expected 1 to 21"),
        ("k_reciprocal:weight=0", "weight: expected more than 0"),
        ("expansion:alpha=-1", "alpha: expected a number of at least 0"),
        ("expansion:alpha=inf", "alpha: expected a number of at least 0"),
    ],
)
def test_mistakes(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        check_rerank(parse_rerank(text), 40)


def test_eval_compares_with_re_ranking(tmp_path: Path, dmlkit: Cli):
    np.save(tmp_path / "x.npy", points_on("sphere", 40, 5)[1].numpy())
    np.save(tmp_path / "y.npy", np.arange(40) % 5)
    words = ("eval", tmp_path / "x.npy", "--labels", tmp_path / "y.npy", "--metric", "map@r", "--metric", "nmi")
    report = dmlkit(*words, "--rerank", "k_reciprocal:k1=6,k2=3", "--json").json()
    plain = dmlkit(*words, "--json").json()
    reranked = report["alternative"]
    assert report["metrics"] == plain["metrics"] and plain["alternative"] is None
    assert reranked["options"] == {"k1": 6, "k2": 3, "weight": 0.3} and list(reranked["metrics"]) == ["map@r"]
    change = reranked["differences"]["map@r"]
    assert change["difference"] == pytest.approx(reranked["metrics"]["map@r"] - report["metrics"]["map@r"])
    assert change["low"] <= change["difference"] <= change["high"]
    shown = dmlkit(*words, "--rerank", "expansion").out
    assert "re-ranked by expansion: n 5, alpha 3" in shown and "the gallery as a whole" in shown
    for more, message in (
        (("--rerank", "k_reciprocal:k1=40"), "k1: expected 1 to 39, since there are 40 images to search in; got 40"),
        (("--rerank", "k_recip"), "--rerank k_recip: unknown method 'k_recip'; expected k_reciprocal or expansion"),
        (("--by", "camera"), "--by camera: applies to a run"),
    ):
        dmlkit(*words, *more).refused(message)


@pytest.mark.parametrize(
    "manifold",
    [
        Euclidean(4, similarity="dot"),
        Euclidean(4, similarity="negative_squared_distance"),
        Product(4, factors=(Euclidean.Config(),) * 2, similarity="negative_squared_chordal_distance"),
    ],
)
def test_expansion_weights_by_the_cosine_or_the_distance_whatever_the_similarity(manifold):
    """In flat spaces, against loops; the inner product of long points is far above 1, and a square is no distance."""
    x = 3 * points_on("euclidean", 30, 6)[1].numpy()
    products, lengths = x @ x.T, np.linalg.norm(x, axis=1)
    apart = np.linalg.norm(x[:, None] - x, axis=2)
    is_dot = manifold.similarity_name == "dot"
    weights = np.maximum(products / np.outer(lengths, lengths), 0) if is_dot else np.exp(-apart)
    scores = products if is_dot else -apart
    expected = np.empty_like(x)
    for i in range(30):
        near = [j for j in np.argsort(-scores[i]) if j != i][:3]
        total = x[i] + sum(weights[i, j] ** 2 * x[j] for j in near)
        expected[i] = total / (1 + sum(weights[i, j] ** 2 for j in near))
    found = ExpandedGallery(manifold, torch.from_numpy(x), Expansion(3, 2)).points
    assert np.abs(found.detach().numpy() - expected).max() < 1e-6
