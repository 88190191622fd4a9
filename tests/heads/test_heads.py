"""Heads against their equations."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import geoopt
import numpy as np
import pytest
import torch
from mpmath import matrix, mp, mpf
from torch import Tensor
from torch.nn.functional import normalize

from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.heads import LorentzLinear, MobiusLinear, Neck
from dmlkit.losses import ArcFace, Triplet
from dmlkit.manifolds import Euclidean, Lorentz, Manifold, Poincare, Sphere
from dmlkit.recipe.file import parse_recipe
from dmlkit.training.experiment import assemble
from dmlkit.training.train import train
from tests.conftest import refuses
from tests.training.test_train import assert_equal_weights, weights
from tests.training.test_tuning import Stopper

CURVATURES = (-0.1, -1.0, -4.0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(head: type[Any], space: type[Any], curvature: float, *, bias: bool = True) -> Any:
    torch.manual_seed(0)
    built = head(6, space(4, curvature=curvature, clip_distance=None), bias=bias).double()
    if bias:
        built.bias.data.copy_(0.3 * random(4, seed=3))
    return built


@pytest.mark.parametrize("curvature", CURVATURES)
def test_it_is_geoopts_exponential_map_transport_and_exponential_map(curvature: float):
    head = layer(LorentzLinear, Lorentz, curvature)
    sheet = geoopt.Lorentz(k=torch.tensor(-1 / curvature, dtype=torch.float64))
    features = 0.3 * random(20, 6)
    inside = sheet.expmap0(torch.nn.functional.pad(features @ head.linear.weight.T, (1, 0)))
    moved = sheet.transp0(inside, torch.nn.functional.pad(head.bias, (1, 0)).expand_as(inside))
    torch.testing.assert_close(head(features), sheet.expmap(inside, moved), atol=1e-8, rtol=1e-8)


def test_without_bias_it_is_an_exponential_map_behind_a_linear_layer():
    head, features = layer(LorentzLinear, Lorentz, -1.0, bias=False), random(12, 6)
    expected = head.manifold.from_features(features @ head.linear.weight.T)
    torch.testing.assert_close(head(features), expected)


def test_far_points_stay_on_the_sheet_with_a_finite_gradient():
    head = LorentzLinear(6, Lorentz(4, clip_distance=None))
    with torch.no_grad():
        head.bias.fill_(50.0)
    features = (1e4 * random(8, 6).float()).requires_grad_()
    points = head(features)
    points.sum().backward()
    assert head.manifold.geometry.check_point_on_manifold(points.detach(), atol=1e-4)
    assert features.grad is not None and features.grad.isfinite().all()


def log_map(projected: Tensor, bias: Tensor, curvature: float, clip_distance: float | None) -> list[float]:
    """log_0 of W h moved by b, in 50 digits: by the Möbius sum in coordinates of the ball (Ganea et al.)."""
    root, border = mp.sqrt(-mpf(curvature)), 2 * mp.atanh(1 - mpf("4e-3"))  # units of 1 / root; as far as points go

    def cut(vector: matrix, length: mpf) -> matrix:
        return vector * min(mpf(1), length / mp.norm(vector))

    def exponential(vector: matrix) -> matrix:
        return vector * (mp.tanh(mp.norm(vector) / 2) / mp.norm(vector))

    longest = border if clip_distance is None else min(border, clip_distance * root)
    x = exponential(cut(root * matrix(projected.tolist()), longest))
    y = exponential(cut(root * matrix(bias.tolist()), border))
    dot, xx, yy = (sum(a * b for a, b in zip(*pair, strict=True)) for pair in ((x, y), (x, x), (y, y)))
    total = ((1 + 2 * dot + yy) * x + (1 - xx) * y) / (1 + 2 * dot + xx * yy)
    moved = cut(total * (2 * mp.atanh(mp.norm(total)) / mp.norm(total)), border)
    return [float(value / root) for value in moved]


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("clip_distance", [None, 2.3])
def test_it_is_the_moebius_head_and_the_closed_form_for_features_of_any_length(curvature, clip_distance):
    """In float32, with W as it starts and one that brings long features back, short and long biases."""
    torch.manual_seed(0)
    sheet = LorentzLinear(6, Lorentz(4, curvature=curvature, clip_distance=clip_distance))
    ball = MobiusLinear(6, Poincare(4, curvature=curvature, clip_distance=clip_distance))
    weight, direction = sheet.linear.weight.detach().clone(), torch.nn.functional.normalize(torch.randn(4), dim=0)
    lengths = torch.tensor([1e-3, 0.3, 1.0, 5.0, 26.0, 100.0])
    features = lengths[:, None] * torch.nn.functional.normalize(torch.randn(6, 6), dim=1)
    for shrink, bias in product((1.0, 0.02), (0.01, 0.5, 3.0)):
        parameters = {"linear.weight": shrink * weight, "bias": bias * direction}
        sheet.load_state_dict(parameters, strict=False)
        ball.load_state_dict(parameters, strict=False)
        with torch.no_grad():
            ours, others = (head.manifold.to_features(head(features)) for head in (sheet, ball))
            projected = features.double() @ parameters["linear.weight"].double().T
        with mp.workdps(50):
            rows = [log_map(row, parameters["bias"].double(), curvature, clip_distance) for row in projected]
        expected = torch.tensor(rows)
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(others, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("head", "space", "message"),
    [
        (LorentzLinear, Poincare(6), "LorentzLinear: expected the manifold lorentz, got poincare, because "),
        (MobiusLinear, Sphere(6), "MobiusLinear: expected the manifold poincare, got sphere, because "),
        (Neck, Poincare(6), "Neck: expected the manifold euclidean or sphere, got poincare, because "),
    ],
)
def test_another_manifold_is_refused(head: type[Any], space: Manifold, message: str):
    with pytest.raises(ValueError, match=message):
        head(6, space)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_it_is_geoopts_exponential_map_product_and_sum(curvature: float):
    head = layer(MobiusLinear, Poincare, curvature)
    ball = geoopt.PoincareBall(c=torch.tensor(-curvature, dtype=torch.float64))
    features = 0.2 * random(20, 6)
    # its tangent vectors at the origin are 2|v| long
    inside = ball.mobius_matvec(head.linear.weight, ball.expmap0(features / 2))
    expected = ball.mobius_add(inside, ball.expmap0(head.bias / 2))
    assert torch.allclose(head(features), expected, atol=1e-6)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_addition_is_geoopts(curvature: float):
    manifold = Poincare(5, curvature=curvature).double()
    # well inside the ball: a sum that is projected back from the boundary cannot be undone
    x, y = (manifold.from_features(0.3 * random(30, 5)), manifold.from_features(0.3 * random(30, 5, seed=1)))
    theirs = geoopt.PoincareBall(c=torch.tensor(-curvature, dtype=torch.float64)).mobius_add(x, y)
    assert torch.allclose(manifold.add(x, y), theirs, atol=1e-6)
    assert torch.allclose(manifold.add(-x, manifold.add(x, y)), y, atol=1e-6)  # left cancellation
    assert torch.allclose(manifold.add(x, torch.zeros_like(x)), x)


def test_a_small_curvature_gives_the_linear_head():
    head, features = layer(MobiusLinear, Poincare, -1e-6), random(12, 6)
    assert torch.allclose(
        head.manifold.to_features(head(features)), features @ head.linear.weight.T + head.bias, atol=1e-4
    )


RECIPE = """\
dataset: {name: glyphs, classes: 24, images_per_class: 10, size: 16}
transform: {name: plain, size: 16}
backbone: {name: small_cnn, width: 4}
embedding_dim: 16
head: {name: neck}
loss:
  name: sum
  losses: [{name: arcface, scale: 8}, {name: triplet, squared: false}]
  on: [after, before]
sampler: {name: class_balanced, classes_per_batch: 4, images_per_class: 4}
training: {epochs: 2}
metrics: [map@r]
"""


def test_it_is_batch_norm_without_shift():
    features = torch.randn(7, 3, dtype=torch.float64) * 4 + 2
    neck = Neck(3, Euclidean(3)).double()
    neck.norm.weight.data.copy_(torch.tensor([1.0, 2.0, 0.5]))
    x = features.numpy()
    mean, variance = x.mean(0), x.var(0)
    expected = (x - mean) / np.sqrt(variance + 1e-5) * [1.0, 2.0, 0.5]
    np.testing.assert_allclose(neck(features).detach().numpy(), expected, rtol=1e-9, atol=1e-12)
    # retrieval takes running statistics, of which one batch is a tenth
    expected = (x - 0.1 * mean) / np.sqrt(0.9 + 0.1 * x.var(0, ddof=1) + 1e-5) * [1.0, 2.0, 0.5]
    np.testing.assert_allclose(neck.eval()(features).detach().numpy(), expected, rtol=1e-9, atol=1e-12)


def test_in_training_the_points_before_it_follow_those_after_it_where_a_loss_takes_them():
    features, neck = torch.randn(6, 4), Neck(4, Sphere(4))
    assert neck(features).shape == (6, 4)
    neck.gives_before = True
    after, before = neck(features).split(4, 1)
    torch.testing.assert_close(before, normalize(features))
    standard = (features - features.mean(0)) / features.std(0, correction=0)
    torch.testing.assert_close(after, normalize(standard), atol=1e-4, rtol=1e-4)
    assert neck.eval()(features).shape == (6, 4)


def test_each_loss_takes_the_points_that_the_recipe_says():
    experiment = assemble(parse_recipe(RECIPE, "r.yaml"))
    images = torch.stack([torch.as_tensor(experiment.train.sample(index)) for index in range(0, 60, 4)])
    labels = experiment.train.labels[:60:4]
    model = experiment.model.train()
    value = experiment.objective(model(images), labels)
    features = model.backbone(model.normalization(images))
    standard = (features - features.mean(0)) / (features.var(0, correction=0) + 1e-5).sqrt()
    arcface = ArcFace(Sphere(16), experiment.objective.loss.num_classes, scale=8.0)
    arcface.load_state_dict({"proxies": experiment.objective.state_dict()["loss.each.0.proxies"]})
    triplet = Triplet(Sphere(16), squared=False)
    expected = arcface(normalize(standard), labels) + triplet(normalize(features), labels)
    torch.testing.assert_close(value, expected)


def test_a_run_learns_the_scale_keeps_the_shift_at_0_and_resumes_to_the_same_bits(tmp_path: Path):
    recipe = parse_recipe(
        RECIPE,
        "r.yaml",
        ["training.gradient_cache=8", "regularizers=[{name: hierarchy, num_proxies: 16, neighbors: 4}]"],
    )
    with pytest.warns(UserWarning, match="removes this difference, but not that of the neck"):
        train(recipe, tmp_path / "whole", device="cpu")
        with pytest.raises(TrainingStoppedError):
            train(recipe, tmp_path / "cut", device="cpu", progress=Stopper(0, last=False))
        train(recipe, tmp_path / "cut", device="cpu", resume=True)
    whole = weights(tmp_path / "whole")
    assert_equal_weights(weights(tmp_path / "cut"), whole)
    assert not whole["head.norm.bias"].any()
    assert (whole["head.norm.weight"] - 1).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "metrics",
            "manifold: {name: poincare}\nmetrics",
            "r.yaml:5: head: neck needs manifold.name euclidean or sphere",
        ),
        ("{name: neck}", "{name: linear}", "r.yaml:6: loss: sum needs head.name neck, got linear, because loss.on has"),
        ("[after, before]", "[before]", "r.yaml:9: loss.on: expected one for each of 2 losses, got 1"),
        ("[after, before]", "[after, between]", "r.yaml:9: loss.on.1: "),
    ],
)
def test_what_does_not_fit_is_refused_when_the_recipe_is_read(old: str, new: str, message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        parse_recipe(RECIPE.replace(old, new), "r.yaml")


def test_without_a_layer_the_embedding_is_as_wide_as_the_features():
    recipe = parse_recipe(RECIPE, "r.yaml", ["embedding_dim=8"])
    refuses("embedding_dim: got 8, but the head none keeps the 16 features .*neck: head.head", assemble, recipe)
    narrow = parse_recipe(RECIPE, "r.yaml", ["embedding_dim=8", "head={name: neck, head: {name: linear}}"])
    assert assemble(narrow).model.head.get_parameter("head.linear.weight").shape == (8, 16)
