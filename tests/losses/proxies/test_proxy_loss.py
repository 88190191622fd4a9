"""The engine of losses over proxies: blocks of classes, steps that compute a part of them, and centers."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlkit.distributed.exchange import ClassShard
from dmlkit.errors import UserError
from dmlkit.losses import MPA, ProxyAnchor, ProxyGML, ProxyISA, ProxyNCA, SoftTriple
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.proxies.centers import CenterPooling, distances_within, pool_centers
from dmlkit.losses.proxies.proxy_loss import ProxyLoss, require_all, select
from dmlkit.losses.proxies.similarity import BLOCK_NUMBERS, KEPT_NUMBERS, automatic_block_size, may_wait, similarity_to
from dmlkit.losses.proxies.transport_weights import TransportWeights
from dmlkit.losses.proxy_gml import largest
from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Sphere
from dmlkit.manifolds.base import Manifold
from dmlkit.recipe.file import parse_recipe
from dmlkit.transport.members import Exact
from tests.conftest import TINY_RECIPE

CLASSES = 40
LABELS = torch.tensor([3, 3, 17, 39, 17, 0])
SAMPLED = sorted(name for name, variant in LossConfig.variants.items() if variant.shares_classes is True)


def build(name: str, num_classes: int = CLASSES, **options: float) -> ProxyLoss:
    return LossConfig.variants[name](**options).build(Sphere(8), num_classes).double()


@pytest.mark.parametrize("kind", ["max", "mean", "softmax"])
def test_a_gamma_that_changes_nothing_is_told(kind: CenterPooling):
    points = normalize(torch.randn(len(LABELS), 8, generator=torch.Generator().manual_seed(0)), dim=1)
    values: list[Tensor] = []
    for gamma in (0.1, 0.5):
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            values.append(MPA(Sphere(8), CLASSES, class_similarity=kind, gamma=gamma)(points, LABELS))
        message = [f"loss.gamma: 0.5 has no effect on class_similarity {kind}; remove it"]
        assert [str(warning.message) for warning in warned] == (message if gamma == 0.5 and kind != "softmax" else [])
    assert torch.equal(*values) == (kind != "softmax")


def test_what_needs_all_classes_refuses_two_ranks_that_share_them():
    loss = build("proxy_anchor")
    classes = loss.classes(normalize(torch.ones(len(LABELS), 8, dtype=torch.float64), dim=1), LABELS)
    require_all(classes, "they are ranked")
    halves = replace(classes, shard=ClassShard(CLASSES, rank=0, ranks=2))
    with pytest.raises(ValueError, match="can neither be sampled nor split over ranks, because they are ranked"):
        require_all(halves, "they are ranked")


@pytest.mark.parametrize("name", SAMPLED)
def test_a_step_is_the_loss_of_the_sampled_classes_alone_and_evaluation_that_of_all(name: str):
    """Also in blocks of 3 classes."""
    torch.manual_seed(0)
    sampled = build(name, negative_fraction=0.25, chunk_size=3)
    points = normalize(torch.randn(len(LABELS), 8, dtype=torch.float64), dim=1).requires_grad_()
    torch.manual_seed(5)
    classes = sampled.classes(points, LABELS).chosen
    assert len(classes) == 10 and set(LABELS.tolist()) <= set(classes.tolist())
    alone = build(name, num_classes=10)
    alone.proxies.data.copy_(sampled.proxies.data[classes])
    expected = alone(points, torch.tensor([classes.tolist().index(label) for label in LABELS.tolist()]))
    torch.manual_seed(5)
    value = sampled(points, LABELS)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=0)
    to_points, to_proxies = torch.autograd.grad(value, (points, sampled.proxies))
    expected_gradients = torch.autograd.grad(expected, (points, alone.proxies))
    torch.testing.assert_close((to_points, to_proxies[classes]), expected_gradients, rtol=1e-9, atol=1e-11)
    assert not to_proxies[torch.ones(CLASSES, dtype=torch.bool).index_fill(0, classes, False)].any()
    whole = build(name)
    whole.load_state_dict(sampled.state_dict())
    torch.testing.assert_close(sampled.eval()(points, LABELS), whole(points, LABELS))


def test_every_other_class_is_drawn_equally_often():
    torch.manual_seed(0)
    loss = build("norm_softmax", negative_fraction=0.25)
    points = torch.zeros(len(LABELS), 8, dtype=torch.float64)
    counts, draws = torch.zeros(CLASSES), 3000
    for _ in range(draws):
        counts[loss.classes(points, LABELS).chosen] += 1
    own = LABELS.unique()
    assert (counts[own] == draws).all()
    others = counts[torch.ones(CLASSES, dtype=torch.bool).index_fill(0, own, False)] / draws
    share = 6 / 36  # 10 of 40 classes, 4 of them given
    assert (others - share).abs().max() < 4.5 * (share * (1 - share) / draws) ** 0.5


def test_a_batch_with_more_classes_than_the_fraction_is_kept_whole():
    loss = build("norm_softmax", negative_fraction=0.05)
    points, labels = torch.zeros(12, 8, dtype=torch.float64), torch.arange(12)
    assert loss.classes(points, labels).chosen.tolist() == labels.tolist()


def test_each_rank_draws_among_its_classes_alone_also_where_others_hold_those_of_the_batch():
    for rank in range(3):
        shard = ClassShard(CLASSES, rank, ranks=3)
        own = {label - shard.classes.start for label in LABELS.tolist() if label in shard.classes}
        for seed in range(20):
            torch.manual_seed(seed)
            drawn, total = select(shard, LABELS, 0.5)
            assert drawn is not None and own <= set(drawn.tolist()) <= set(range(len(shard.classes)))
            assert len(drawn) == 7 and total == 21  # ceil(13 / 2) and ceil(14 / 2)


def test_shards_hold_all_classes_once():
    torch.manual_seed(0)
    whole = build("mpa", num_classes=11)
    parts = []
    for rank in range(3):
        torch.manual_seed(0)
        part = build("mpa", num_classes=11)
        part.keep_shard(rank, 3)
        parts.append(part.proxies)
    assert [len(part) for part in parts] == [3, 4, 4]
    torch.testing.assert_close(torch.cat(parts), whole.proxies, rtol=0, atol=0)


def test_what_cannot_be_shared_out_or_sampled_is_refused():
    with pytest.raises(ValueError, match=r"got 4 classes for 5 ranks, expected at least one class per rank"):
        build("cosface", num_classes=4).keep_shard(0, 5)
    with pytest.raises(ValueError, match="ProxyAnchor: negative_fraction: got 0, expected greater than 0"):
        ProxyAnchor(Sphere(8), 4, negative_fraction=0)
    transport = TransportWeights(solver=Exact(), group_size=4, seed=0)
    points, labels = torch.eye(8)[:4], torch.arange(4)
    with pytest.raises(ValueError, match=r"can neither be sampled nor split over ranks, because the transport"):
        MPA(Sphere(8), 40, transport=transport, negative_fraction=0.5)(points, labels)
    with pytest.raises(ValueError, match=r"can neither be sampled nor split over ranks, because the k most"):
        ProxyGML(Sphere(8), 40, negative_fraction=0.5)(points, labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "{name: triplet}"}, "training.shard_proxies: triplet does not support sharded proxies; use one of a"),
        ({"loss": "{name: proxy_gml}"}, "training.shard_proxies: proxy_gml does not support sharded proxies"),
        ({"loss": "{name: mpa, transport: {}}"}, "loss: mpa needs training.shard_proxies False, got"),
        ({"precision": "fp16"}, "training.shard_proxies: got precision fp16, whose scaler"),
    ],
)
def test_recipes_that_cannot_share_proxies_out_are_refused_with_the_reason(change: dict[str, str], message: str):
    precision = change.get("precision", "fp32")
    text = TINY_RECIPE.replace("{epochs: 3}", f"{{epochs: 3, shard_proxies: true, precision: {precision}}}")
    text = text.replace("{name: proxy_anchor}", change.get("loss", "{name: proxy_anchor}"))
    with pytest.raises(UserError, match=message):
        parse_recipe(text, "tiny.yaml")


class WarmSphere(Sphere):
    """A sphere with a learnable temperature, which the walks must pass a gradient to."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        return super().similarity(x, y) / self.temperature


def losses(manifold: Sphere, chunk_size: int | None) -> list[Loss]:
    torch.manual_seed(0)
    return [
        ProxyAnchor(manifold, 30, chunk_size=chunk_size),
        MPA(manifold, 30, proxies_per_class=2, chunk_size=chunk_size),
        ProxyNCA(manifold, 30, chunk_size=chunk_size),
        SoftTriple(manifold, 30, centers_per_class=2, chunk_size=chunk_size),
        ProxyGML(manifold, 30, proxies_per_class=2, ratio=0.5, chunk_size=chunk_size),
    ]


def batch() -> tuple[Tensor, Tensor]:
    points = nn.functional.normalize(torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    return points.requires_grad_(), torch.arange(12) // 3


@pytest.mark.parametrize("chunk_size", [7, None])
@pytest.mark.parametrize("index", range(5))
def test_a_learnable_manifold_gets_its_gradient(index: int, chunk_size: int | None):
    points, labels = batch()
    loss = losses(WarmSphere(8), chunk_size)[index].double()
    temperature = loss.manifold.temperature
    points = points.detach().double()
    (gradient,) = torch.autograd.grad(loss(points, labels), temperature)
    step = 1e-6
    values = []
    for sign in (1, -1):
        temperature.data.add_(sign * step)
        values.append(loss(points, labels).item())
        temperature.data.sub_(sign * step)
    assert gradient.item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)


@pytest.mark.parametrize("chunk_size", [7, None])
@pytest.mark.parametrize("index", range(5))
def test_a_backward_pass_under_autocast_is_computed_in_full(index: int, chunk_size: int | None):
    points, labels = batch()
    loss = losses(Sphere(8), chunk_size)[index]
    gradients: list[Tensor] = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            gradients += torch.autograd.grad(loss(points, labels), points)
    assert torch.equal(*gradients)


def test_similarities_are_kept_only_where_they_are_small():
    sphere = Sphere(8)
    points = torch.randn(12, 8)
    few, many = torch.empty(30, 8), torch.empty(1, 8).expand(KEPT_NUMBERS // 8, 8)
    cosine, distance = (similarity_to(manifold, None) for manifold in (sphere, Poincare(8)))
    for measure in (cosine, distance):
        assert may_wait(measure, points, few) and not may_wait(measure, points, many)
    assert may_wait(cosine, points[:8], many)  # no more than the proxies and their gradient
    assert not may_wait(distance, points[:8], many)  # a graph would wait, too
    labels = torch.zeros(12, dtype=torch.int64)
    assert ProxyAnchor(sphere, 30).classes(points, labels).keep
    assert not ProxyAnchor(sphere, 30, chunk_size=7).classes(points, labels).keep  # who asks for it wants little memory


def test_blocks_are_as_few_as_the_limit_allows_and_of_equal_size():
    limit = BLOCK_NUMBERS["cpu"] // 512
    for classes, size in ((100, 100), (limit, limit), (limit + 1, limit // 2 + 1), (3 * limit - 1, limit)):
        assert automatic_block_size(torch.empty(180, 512), torch.empty(1, 512).expand(classes, 512)) == size
    assert automatic_block_size(torch.empty(1024, 8), torch.empty(1, 4, 8).expand(limit, 4, 8)) == limit // 8


def test_gradients_of_the_gradient_are_refused():
    points, labels = batch()
    for loss in losses(Sphere(8), None):
        with pytest.raises(RuntimeError, match="second derivatives"):
            torch.autograd.grad(loss(points, labels), points, create_graph=True)


@pytest.mark.parametrize("sizes", [[1, 2], [7, 30]])
def test_the_largest_are_those_of_a_sorted_row(sizes: list[int]):
    values = torch.randn(6, 30, generator=torch.Generator().manual_seed(0))
    for count in sizes:
        assert torch.equal(largest(values, count).sort().values, values.sort().values[:, 30 - count :])


@pytest.mark.parametrize("loss", [ProxyISA(Sphere(8), 30), ProxyGML(Sphere(8), 30, proxies_per_class=2, ratio=0.5)])
def test_similarities_computed_once_give_the_numbers_of_those_computed_twice(loss: Loss, monkeypatch):
    points, labels = batch()
    loss.set_epoch(2)
    found: list[Tensor] = []
    for once in (True, False):
        with monkeypatch.context() as patch:
            if not once:
                patch.setattr(f"{type(loss).__module__}.computed_once", lambda classes: classes)
            before = {name: value.clone() for name, value in loss.state_dict().items()}
            value = loss(points, labels)
            leaves = (points, loss.proxies)
            found += [value, *torch.autograd.grad(value, leaves, retain_graph=True)]
            found += torch.autograd.grad(value, leaves)  # a second backward pass computes them anew
            loss.load_state_dict(before)
    for one, other in zip(found[:5], found[5:], strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(*pair) for pair in zip(found[1:3], found[3:5], strict=True))


MANIFOLDS = {
    "sphere": Sphere(5),
    "arc": Sphere(5, metric="arc"),
    "euclidean": Euclidean(5),
    "poincare": Poincare(5),
    "lorentz": Lorentz(5),
}


@pytest.mark.parametrize("per_group", [2, 3, 70])
@pytest.mark.parametrize("manifold", MANIFOLDS.values(), ids=MANIFOLDS)
def test_distances_within_groups_are_those_of_pairs(manifold: Manifold, per_group: int):
    torch.manual_seed(0)
    points = manifold.from_features(torch.randn(50, per_group, 5, dtype=torch.float64) / 3)
    expected = manifold.paired_distance(points[:, :, None], points[:, None])
    torch.testing.assert_close(distances_within(manifold.double(), points), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("centers", [1, 2, 5])
@pytest.mark.parametrize("kind", ["softmax", "max", "mean"])
def test_pooled_similarities_and_their_gradient_are_those_of_the_formula(kind: CenterPooling, centers: int):
    torch.manual_seed(0)
    each = torch.randn(4, centers, 3, dtype=torch.float64).mul(2).round().div(2).requires_grad_()  # some are equal
    weights, ties = each.detach().div(0.3).exp(), (each.detach() == each.detach().amax(1, keepdim=True)).double()
    weights, ties = weights / weights.sum(1, keepdim=True), ties / ties.sum(1, keepdim=True)
    mean = (weights * each.detach()).sum(1)
    value, slope = {
        "softmax": (mean, weights * (1 + (each.detach() - mean[:, None]) / 0.3)),
        "max": (each.detach().amax(1), ties),
        "mean": (each.detach().mean(1), torch.full_like(each, 1 / centers)),
    }[kind]
    gradient = torch.randn_like(value)
    pooled = pool_centers(each, kind, 0.3)
    torch.testing.assert_close(pooled.detach(), value, rtol=1e-12, atol=1e-15)
    found = torch.autograd.grad(pooled, each, gradient)[0]
    torch.testing.assert_close(found, gradient[:, None] * slope, rtol=1e-12, atol=1e-15)
