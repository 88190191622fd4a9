"""Steps that compute a part of the classes, against the loss of just these classes."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from dmlkit.distributed.exchange import ClassShard
from dmlkit.losses import MPA, ProxyAnchor, ProxyGML
from dmlkit.losses.base import LossConfig
from dmlkit.losses.proxies.proxy_loss import ProxyLoss, require_all
from dmlkit.losses.proxies.transport_weights import TransportWeights
from dmlkit.manifolds import Sphere
from dmlkit.recipe.file import parse_recipe
from dmlkit.transport.members import Exact
from tests.conftest import TINY_RECIPE

CLASSES = 40
LABELS = torch.tensor([3, 3, 17, 39, 17, 0])
SAMPLED = sorted(name for name, variant in LossConfig.variants.items() if variant.shares_classes is True)


def build(name: str, num_classes: int = CLASSES, **options: float) -> ProxyLoss:
    return LossConfig.variants[name](**options).build(Sphere(8), num_classes).double()


def test_what_needs_all_classes_refuses_two_ranks_that_share_them():
    loss = build("proxy_anchor")
    classes = loss.classes(normalize(torch.ones(len(LABELS), 8, dtype=torch.float64), dim=1), LABELS)
    require_all(classes, "they are ranked")
    halves = replace(classes, shard=ClassShard(CLASSES, rank=0, ranks=2))
    with pytest.raises(ValueError, match="can neither be sampled nor split over ranks, because they are ranked"):
        require_all(halves, "they are ranked")


@pytest.mark.parametrize("name", SAMPLED)
def test_a_step_is_the_loss_of_the_sampled_classes_alone(name: str):
    torch.manual_seed(0)
    sampled = build(name, negative_fraction=0.25)
    points = normalize(torch.randn(len(LABELS), 8, dtype=torch.float64), dim=1).requires_grad_()
    torch.manual_seed(5)
    classes = sampled.classes(points, LABELS).chosen
    assert len(classes) == 10 and set(LABELS.tolist()) <= set(classes.tolist())
    alone = build(name, num_classes=10)
    alone.proxies.data.copy_(sampled.proxies.data[classes])
    labels = torch.tensor([classes.tolist().index(label) for label in LABELS.tolist()])
    expected = alone(points, labels)
    torch.manual_seed(5)
    value = sampled(points, LABELS)
    torch.testing.assert_close(value, expected)
    to_points, to_proxies = torch.autograd.grad(value, (points, sampled.proxies))
    expected_gradients = torch.autograd.grad(expected, (points, alone.proxies))
    torch.testing.assert_close((to_points, to_proxies[classes]), expected_gradients)
    others = torch.ones(CLASSES, dtype=torch.bool).index_fill(0, classes, False)
    assert not to_proxies[others].any()


@pytest.mark.parametrize("name", SAMPLED)
def test_evaluation_computes_all_classes(name: str):
    torch.manual_seed(0)
    sampled, whole = build(name, negative_fraction=0.25).eval(), build(name)
    whole.load_state_dict(sampled.state_dict())
    points = normalize(torch.randn(len(LABELS), 8, dtype=torch.float64), dim=1)
    torch.testing.assert_close(sampled(points, LABELS), whole(points, LABELS))


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
    ("change", "told"),
    [
        ({"loss": "{name: triplet}"}, "training.shard_proxies: triplet does not support sharded proxies; use one of a"),
        ({"loss": "{name: proxy_gml}"}, "training.shard_proxies: proxy_gml does not support sharded proxies"),
        ({"loss": "{name: mpa, transport: {}}"}, "loss: mpa needs training.shard_proxies False, got"),
        ({"precision": "fp16"}, "training.shard_proxies: got precision fp16, whose scaler"),
    ],
)
def test_recipes_that_cannot_share_proxies_out_are_refused_with_the_reason(change: dict[str, str], told: str):
    precision = change.get("precision", "fp32")
    text = TINY_RECIPE.replace("{epochs: 3}", f"{{epochs: 3, shard_proxies: true, precision: {precision}}}")
    text = text.replace("{name: proxy_anchor}", change.get("loss", "{name: proxy_anchor}"))
    with pytest.raises(Exception, match=told):
        parse_recipe(text, "tiny.yaml")
