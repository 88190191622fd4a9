"""A sum of losses against its losses, each alone, and what training writes about them."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.losses import ArcFace, Contrastive, CrossBatchMemory, Matryoshka, ProxyAnchor, SoftTriple, Sum, Triplet
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.manifolds import ManifoldConfig, Poincare, Sphere
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.experiment import draw_proxies
from tests.conftest import refuses
from tests.training.test_tuning import Stopper, trained

LABELS = torch.tensor([0, 1, 1, 2, 0, 2])
LOSSES = "[{name: arcface, scale: 8}, {name: triplet}, {name: triplet, smooth: true}]"
CHANGES = (
    f"loss={{name: sum, losses: {LOSSES}, weights: [1, 2, 0.5]}}",
    "sampler={name: class_balanced, classes_per_batch: 2, images_per_class: 4}",
    "training.epochs=2",
)


@pytest.mark.parametrize(
    ("space", "losses"),
    [
        (Sphere.Config(), (ArcFace.Config(), Triplet.Config(), ArcFace.Config(margin=0.1, centers_per_class=2))),
        (Poincare.Config(), (SoftTriple.Config(), CrossBatchMemory.Config(size=8), ProxyAnchor.Config())),
    ],
)
def test_value_terms_and_gradients_are_those_of_the_losses_alone(space: ManifoldConfig, losses: tuple[LossConfig, ...]):
    """Over two steps, so that a memory has embeddings of the first one."""
    manifold, weights = space.build(4).double(), (1.0, 0.3, 2.0)
    loss = Sum(manifold, num_classes=3, losses=losses, weights=weights).double()
    alone = [config.build(manifold, 3).double() for config in losses]
    for mine, other in zip(loss.each, alone, strict=True):
        other.load_state_dict(mine.state_dict())
    for seed in range(2):
        torch.manual_seed(seed)
        features = torch.randn(6, 4, dtype=torch.float64).requires_grad_()
        points = manifold.from_features(features)
        value = loss(points, LABELS)
        values = [other(points, LABELS) for other in alone]
        expected = sum(weight * term for weight, term in zip(weights, values, strict=True))
        mine, theirs = (
            torch.autograd.grad(of, [features, *learned(terms)], retain_graph=True)
            for of, terms in ((value, loss.each), (expected, alone))
        )
        torch.testing.assert_close((value, mine), (expected, theirs), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(list(loss.terms.values()), values)


def learned(losses: Iterable[Loss]) -> list[Tensor]:
    return [parameter for loss in losses for parameter in loss.parameters() if parameter.requires_grad]


def test_one_loss_of_weight_1_is_the_loss_to_the_bit():
    torch.manual_seed(0)
    loss = Sum(Sphere(4), num_classes=3, losses=(ProxyAnchor.Config(),))
    (alone,) = loss.each
    points = Sphere(4).from_features(torch.randn(6, 4))
    assert loss(points, LABELS).item() == alone(points, LABELS).item() == loss.terms["proxy_anchor"].item()
    assert draw_proxies(loss, 64)[0].shape == (3, 4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sum") / "run"
    return trained(folder, *CHANGES)


def test_the_terms_of_an_epoch_add_up_to_its_loss(whole: Path):
    rows = RunFolder(whole).read_metrics()
    assert len(rows) == 2
    for row in rows:
        terms = row.terms or {}
        assert list(terms) == ["arcface", "triplet", "triplet_2"]
        assert row.loss == pytest.approx(terms["arcface"] + 2 * terms["triplet"] + 0.5 * terms["triplet_2"])


def test_a_run_stopped_within_an_epoch_writes_the_same_terms(whole: Path, tmp_path: Path):
    with pytest.raises(TrainingStoppedError, match="in epoch 1"):
        trained(tmp_path / "cut", *CHANGES, progress=Stopper(0, last=False))
    trained(tmp_path / "cut", *CHANGES, resume=True)
    rows = [RunFolder(run).read_metrics() for run in (whole, tmp_path / "cut")]
    assert [row.terms for row in rows[0]] == [row.terms for row in rows[1]]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            "{name: sum, losses: [{name: triplet}, {name: circle}], weights: [1]}",
            "r.yaml:2: loss.weights: expected one for each of 2 losses, got 1",
        ),
        (
            "{name: sum, losses: [{name: norm_softmax}, {name: triplet}]}",
            "loss.losses.1: triplet needs sampler.pairs of the same class and of different classes",
        ),
        ("{name: sum, losses: []}", "loss.losses: "),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(loss: str, message: str):
    with pytest.raises(UserError) as error:
        parse_recipe(f"dataset: {{name: glyphs}}\nloss: {loss}\nsampler: {{name: random, batch_size: 1}}\n", "r.yaml")
    assert message in str(error.value)


def test_two_sets_of_proxies_are_none_to_regularize():
    text = """
dataset: {name: glyphs}
manifold: {name: poincare}
loss: {name: sum, losses: [{name: proxy_anchor}, {name: soft_triple}]}
regularizers: [{name: hierarchical_clustering}]
"""
    refuses(r"hierarchical_clustering needs loss\.name .* got sum", parse_recipe, text, "r.yaml")
    one = text.replace("soft_triple", "contrastive") + "sampler: {name: class_balanced}\n"
    assert parse_recipe(one, "r.yaml").loss.has_proxies
    assert not Sum.Config(losses=(Contrastive.Config(),)).has_proxies


@pytest.mark.parametrize(
    ("around", "key"),
    [
        ("{{name: matryoshka, loss: {}}}", "loss.loss"),
        ("{{name: sum, losses: [{{name: arcface}}, {}]}}", "loss.losses"),
    ],
)
def test_within_another_loss_there_are_no_points_before_the_neck(around: str, key: str):
    mixed = "{name: sum, losses: [{name: arcface}, {name: triplet}], on: [after, before]}"
    text = "dataset: {name: glyphs}\nhead: {name: neck}\nloss: "
    assert parse_recipe(text + mixed, "r.yaml").loss.name == "sum"
    refuses(rf"^r.yaml:3: {key}: sum has on: before, but only", parse_recipe, text + around.format(mixed), "r.yaml")
    with pytest.raises(ValueError, match="Matryoshka: loss: sum has on: before, but only"):
        Matryoshka(Sphere(8), 3, loss=Sum.Config(on=("after", "before")))
