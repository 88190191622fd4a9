"""Pair losses over images with several labels: positives share one, as loops over sets say."""

import pytest
import torch

from dmlkit.losses import Contrastive, CrossBatchMemory, Margin, ProxyAnchor, RecallSurrogate, SupCon, Triplet
from dmlkit.losses.base import LossConfig
from dmlkit.losses.pair_loss import make_pairs
from dmlkit.manifolds import Sphere
from dmlkit.recipe.file import parse_recipe
from tests.conftest import refuses

SETS = [{0}, {1}, {0, 1}, {1, 2}, {3}, {2, 3}, {4}]
MEMBERS = torch.tensor([[label in one for label in range(5)] for one in SETS])
LABELS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 2, 0, 3, 4, 6])


def shares(i: int, j: int) -> bool:
    return bool(SETS[int(LABELS[i])] & SETS[int(LABELS[j])])


def naive(kind: type, x: torch.Tensor) -> torch.Tensor:
    rows = range(len(x))
    pairs = [(i, j) for i in rows for j in rows if i != j]
    distance = {pair: (x[pair[0]] - x[pair[1]]).norm() for pair in pairs}
    if kind is SupCon:
        found: list[torch.Tensor] = []
        for i in rows:
            near = [j for j in rows if j != i and shares(i, j)]
            total = sum((x[i] @ x[j] / 0.1).exp() for j in rows if j != i)
            found += [-sum(((x[i] @ x[j] / 0.1).exp() / total).log() for j in near) / len(near)] if near else []
        return sum(found) / len(found)
    if kind is Contrastive:
        pulls = [distance[pair] ** 2 for pair in pairs if shares(*pair)]
        pushes = [(1 - distance[pair]) ** 2 for pair in pairs if not shares(*pair) and distance[pair] < 1]
        return sum(pulls) / len(pulls) + sum(pushes) / len(pushes)
    terms = [
        distance[a, p] ** 2 - distance[a, n] ** 2 + 0.1
        for a, p in pairs
        if shares(a, p)
        for n in rows
        if n != a and not shares(a, n)
    ]
    kept = [term for term in terms if term > 0]
    return sum(kept) / len(kept)


@pytest.mark.parametrize("kind", [SupCon, Contrastive, Triplet])
def test_values_and_gradients_equal_loops_over_sets(kind, assert_equals):
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss = kind(Sphere(4))
    loss.use_members(MEMBERS)
    assert_equals(lambda x: loss(x, LABELS), lambda x: naive(kind, x), torch.nn.functional.normalize(x, dim=1))


ABLE = sorted(name for name, variant in LossConfig.variants.items() if variant().takes_several_labels)


@pytest.mark.parametrize("name", ABLE)
def test_sets_of_one_label_change_nothing(name: str):
    config = LossConfig.variants[name]()
    x = Sphere(4).from_features(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)))
    values = []
    for members in (None, torch.eye(7).bool()):
        loss = config.build(Sphere(4), 7)
        assert loss.takes_several_labels and config.takes_several_labels
        loss.use_members(members)
        torch.manual_seed(0)
        values.append([loss(x, LABELS).item(), loss(x.flip(0), LABELS.flip(0)).item()])
    assert values[0] == values[1]


def test_a_memory_holds_sets_and_its_empty_slots_pair_with_nothing():
    loss, plain = CrossBatchMemory(Sphere(4), size=12), Contrastive(Sphere(4))
    loss.use_members(MEMBERS)
    plain.use_members(MEMBERS)
    x = Sphere(4).from_features(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)))
    assert loss(x, LABELS).item() == pytest.approx(plain(x, LABELS).item(), rel=1e-6)
    pairs = make_pairs(x[:5], LABELS[:5], torch.cat([x[:5], x]), torch.cat([LABELS[:5], LABELS]), MEMBERS)
    assert loss(x[:5], LABELS[:5]).item() == pytest.approx(plain.compute_pairs(pairs).item(), rel=1e-6)


def test_losses_for_one_label_refuse_several():
    for loss in (ProxyAnchor(Sphere(4), 7), Margin(Sphere(4), 7), RecallSurrogate(Sphere(4), mixup=True)):
        loss.use_members(None)
        with pytest.raises(ValueError, match="needs one label per image"):
            loss.use_members(MEMBERS)


RECIPE = """\
dataset: {name: table, file: t.csv, separator: "|"}
loss: {name: triplet}
sampler: {name: class_balanced}
metrics: [recall@1, map@r]
"""


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("loss", "{name: proxy_anchor}", "recipe.yaml:2: loss: proxy_anchor"),
        ("loss", "{name: cross_batch_memory, loss: {name: margin}}", "recipe.yaml:2: loss: cross_batch_memory"),
        ("loss", "{name: sum, losses: [{name: sup_con}, {name: arcface}]}", r"recipe.yaml:2: loss\.losses\.1: arcface"),
        ("loss", "{name: recall_surrogate, mixup: true}", "recipe.yaml:2: loss: recall_surrogate"),
        ("sampler", "{name: hard_classes}", "recipe.yaml:3: sampler: hard_classes"),
        ("metrics", "[map@r, nmi]", r"recipe.yaml:4: metrics\.1: nmi"),
        ("regularizers", "[{name: hierarchy}]", r"recipe.yaml:5: regularizers\.0: hierarchy"),
    ],
)
def test_what_needs_one_label_is_refused_when_the_recipe_is_read(key: str, value: str, said: str):
    assert parse_recipe(RECIPE, "recipe.yaml")
    lines = [line for line in RECIPE.splitlines() if not line.startswith(f"{key}:")]
    place = next((i for i, line in enumerate(RECIPE.splitlines()) if line.startswith(f"{key}:")), len(lines))
    lines.insert(place, f"{key}: {value}")
    refuses(f"{said} needs one label per image, got several", parse_recipe, "\n".join(lines), "recipe.yaml")
    assert parse_recipe("\n".join(lines).replace(', separator: "|"', ""), "recipe.yaml")
