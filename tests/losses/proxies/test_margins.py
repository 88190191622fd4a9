"""Margins and weights by the size of the class against loops, the draws of elastic margins, and what is refused."""

from math import pi, sin
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.losses import ArcFace, CosFace, NormSoftmax
from dmlkit.losses.proxies.margins import DynamicMargin
from dmlkit.manifolds import Sphere
from dmlkit.recipe.file import parse_recipe
from dmlkit.training.experiment import assemble
from dmlkit.training.train import train
from tests.training.test_train import assert_equal_weights, weights
from tests.training.test_tuning import Stopper

COUNTS = torch.tensor([1, 2, 50, 7, 900, 16])
DYNAMIC = DynamicMargin.Config(factor=1.1, exponent=0.5, least=0.1)
MARGINS = [1.1 * n**-0.5 + 0.1 for n in COUNTS.tolist()]


def naive(
    x: Tensor,
    labels: Tensor,
    proxies: Tensor,
    margins: list[float],
    *,
    kind: str,
    scale: float = 3,
    row_weights: list[float] | None = None,
) -> Tensor:
    """Cross-entropy with the margin of each row, by the angle itself, to the nearest center of each class."""
    total = torch.zeros((), dtype=x.dtype)
    for i, label in enumerate(labels.tolist()):
        cosines = [max(x[i] @ center for center in centers.view(-1, x.shape[1])) for centers in proxies]
        angle, margin = torch.acos(cosines[label]), margins[i]
        if kind != "arc":
            own = cosines[label] - margin
        elif angle + margin <= pi:
            own = torch.cos(angle + margin)
        else:
            own = cosines[label] - margin * sin(margin)
        logits = torch.stack([scale * (own if c == label else cosine) for c, cosine in enumerate(cosines)])
        total = total - torch.log_softmax(logits, 0)[label] * (row_weights[i] if row_weights else 1)
    return total / len(x)


@pytest.mark.parametrize("centers", [1, 3])
def test_dynamic_margins_of_arcface_and_sub_centers(agree, batch, centers: int):
    loss = ArcFace(Sphere(5), 6, scale=3.0, dynamic=DYNAMIC, centers_per_class=centers).double()
    loss.use_counts(COUNTS)
    rows = [MARGINS[label] for label in batch[1].tolist()]
    agree(loss, lambda x, y, p: naive(x, y, p, rows, kind="arc"))


def test_dynamic_margins_of_cosface_in_blocks_of_classes(agree, batch):
    loss = CosFace(Sphere(5), 6, scale=3.0, dynamic=DYNAMIC, chunk_size=2).double()
    loss.use_counts(COUNTS)
    rows = [MARGINS[label] for label in batch[1].tolist()]
    agree(loss, lambda x, y, p: naive(x, y, p, rows, kind="cos"))


@pytest.mark.parametrize("dynamic", [None, DYNAMIC])
@pytest.mark.parametrize("kind", ["arc", "cos"])
def test_elastic_margins_are_drawn_around_that_of_the_class(batch, kind: str, dynamic: DynamicMargin.Config | None):
    features, labels = batch
    cls = {"arc": ArcFace, "cos": CosFace}[kind]
    loss = cls(Sphere(5), 6, scale=3.0, margin=0.5, deviation=0.02, dynamic=dynamic).double()
    loss.use_counts(COUNTS)
    points = loss.manifold.from_features(features).requires_grad_()
    torch.manual_seed(7)
    value = loss(points, labels)
    torch.manual_seed(7)
    noise = 0.02 * torch.randn(len(labels), dtype=torch.float64)
    middle = [MARGINS[label] if dynamic else 0.5 for label in labels.tolist()]
    rows = [mean + draw for mean, draw in zip(middle, noise.tolist(), strict=True)]
    unit = torch.nn.functional.normalize(loss.proxies.detach(), dim=1)
    expected = naive(points, labels, unit, rows, kind=kind)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, points), torch.autograd.grad(expected, points))
    torch.testing.assert_close(loss.eval()(points, labels), naive(points, labels, unit, middle, kind=kind))


def test_draws_are_normal_and_end_at_4_deviations():
    loss = ArcFace(Sphere(3), 2, deviation=0.0125)
    torch.manual_seed(0)
    draws = loss._margins(torch.zeros(200_000, dtype=torch.int64))
    assert draws.mean().item() == pytest.approx(0.5, abs=2e-4) and draws.std().item() == pytest.approx(0.0125, rel=0.01)
    assert draws.min() >= 0.5 - 0.05 - 1e-6 and draws.max() <= 0.5 + 0.05 + 1e-6


@pytest.mark.parametrize("kind", ["arc", "cos", "norm"])
def test_weights_of_classes(agree, batch, kind: str):
    losses = {
        "arc": lambda: ArcFace(Sphere(5), 6, scale=3.0, margin=0.2, class_balance=0.5),
        "cos": lambda: CosFace(Sphere(5), 6, scale=3.0, margin=0.2, class_balance=0.5),
        "norm": lambda: NormSoftmax(Sphere(5), 6, temperature=1 / 3, class_balance=0.5),
    }
    loss = losses[kind]().double()
    loss.use_counts(COUNTS)
    mean = sum(n**0.5 for n in COUNTS.tolist()) / COUNTS.sum().item()  # of n^-1/2 over images
    rows = [COUNTS[label].item() ** -0.5 / mean for label in batch[1].tolist()]
    margins = [0.0 if kind == "norm" else 0.2] * 9
    agree(loss, lambda x, y, p: naive(x, y, p, margins, kind=kind, row_weights=rows))


def test_margins_that_leave_0_to_pi_are_refused():
    for options, low, high in (
        ({"dynamic": DynamicMargin.Config(factor=3.1, least=0.1)}, "0.1", "3.2"),
        ({"margin": 0.5, "deviation": 0.2}, "-0.3", "1.3"),
        ({"dynamic": DynamicMargin.Config(), "deviation": 0.02}, "-0.03", "0.58"),
    ):
        way = "a smaller deviation, or another" if "deviation" in options else "another"
        limits = f"expected at least 0 and less than {pi:.4g}; choose {way} "
        with pytest.raises(ValueError, match=rf"ArcFace: \w+: margins from {low} to {high}, {limits}"):
            ArcFace(Sphere(3), 2, **options)
    with pytest.raises(ValueError, match=r"CosFace: margin: margins from -0\.25 to 0\.95, expected at least 0; choose"):
        CosFace(Sphere(3), 2, deviation=0.15)
    for options in ({"dynamic": DynamicMargin.Config()}, {"class_balance": 1.0}):
        with pytest.raises(ValueError, match="needs the sizes of the classes; call use_counts"):
            ArcFace(Sphere(3), 2, **options)(Sphere(3).from_features(torch.randn(2, 3)), torch.tensor([0, 1]))


RECIPE = """\
dataset: {name: glyphs, classes: 24, images_per_class: 10, size: 16, tail: 5}
loss: {name: sum, losses: [{name: arcface, dynamic: {}, deviation: 0.01, class_balance: 0.5, centers_per_class: 2}]}
transform: {name: plain, size: 16}
backbone: {name: small_cnn, width: 4}
embedding_dim: 8
sampler: {name: random, batch_size: 12}
training: {epochs: 2}
metrics: [map@r]
"""


def test_a_recipe_takes_the_sizes_of_its_training_classes_and_resumes_to_the_same_bits(tmp_path: Path):
    recipe = parse_recipe(RECIPE, "r.yaml")
    experiment = assemble(recipe)
    margins = dict(experiment.objective.named_buffers())["loss.each.0.class_margins"]
    sizes = [experiment.train.labels.tolist().count(label) for label in range(len(experiment.train.class_names))]
    assert min(sizes) < max(sizes) and margins.tolist() == pytest.approx([0.45 * n**-0.25 + 0.05 for n in sizes])
    train(recipe, tmp_path / "whole", device="cpu")
    with pytest.raises(TrainingStoppedError):
        train(recipe, tmp_path / "cut", device="cpu", progress=Stopper(0, last=False))
    train(recipe, tmp_path / "cut", device="cpu", resume=True)
    assert_equal_weights(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    with pytest.raises(
        UserError, match=r"^r.yaml:2: loss.losses.0.dynamic: margins from -0.35 to 0.9, expected at least 0 "
    ):
        parse_recipe(RECIPE.replace("0.01", "0.1"), "r.yaml")
