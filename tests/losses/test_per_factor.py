"""A loss per factor against the losses of the factors, and what losses within losses require."""

import pytest
import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.losses import MultiSimilarity, PerFactor, SoftTriple
from dmlkit.losses.base import LossConfig
from dmlkit.manifolds import Euclidean, Poincare, Product, Sphere
from dmlkit.recipe.file import parse_recipe
from dmlkit.training.experiment import draw_proxies
from tests.conftest import refuses

FACTORS = (Sphere.Config(), Poincare.Config(curvature=-0.5))
LABELS = torch.tensor([0, 1, 1, 2, 0, 2])


def test_it_adds_the_losses_of_the_factors_and_its_proxies_are_points_of_the_product():
    space = Product(7, factors=FACTORS, widths=(4, 3)).double()
    loss = PerFactor(space, num_classes=3, loss=SoftTriple.Config(centers_per_class=2), weights=(1.0, 0.3)).double()
    features = torch.randn(6, 7, dtype=torch.float64).requires_grad_()
    value = loss(space.from_features(features), LABELS)
    expected = torch.zeros((), dtype=torch.float64)
    for config, weight, columns, mine in zip(FACTORS, (1.0, 0.3), features.split([4, 3], 1), loss.each, strict=True):
        alone = SoftTriple(config.build(columns.shape[1]).double(), num_classes=3, centers_per_class=2).double()
        alone.load_state_dict(mine.state_dict())
        expected = expected + weight * alone(alone.manifold.from_features(columns), LABELS)
    gradients = [torch.autograd.grad(one, features)[0] for one in (value, expected)]
    torch.testing.assert_close([value, gradients[0]], [expected, gradients[1]])
    points, classes = draw_proxies(loss, 64)
    assert points.shape == (6, space.point_dim) and classes.tolist() == [0, 0, 1, 1, 2, 2]
    parts = [
        one.manifold.proxy_points(one.proxies).flatten(0, 1) for one in loss.each if isinstance(one.proxies, Tensor)
    ]
    torch.testing.assert_close(points, torch.cat(parts, 1))
    assert PerFactor(space, loss=MultiSimilarity.Config()).weights == (1.0, 1.0)


def test_every_loss_with_proxies_has_one_or_several_for_each_class():
    for name, variant in LossConfig.variants.items():
        config = variant()
        loss = config.build(Product(8).double() if name == "per_factor" else Sphere(8), 20)
        assert config.has_proxies == hasattr(loss, "proxies"), name
        if config.has_proxies:
            points, classes = draw_proxies(loss, 5000)
            assert len(points) % 20 == 0 and classes.bincount().tolist() == [len(points) // 20] * 20, name


def test_what_does_not_fit_is_refused():
    for space, weights, message in (
        (Euclidean(2), None, "expected a product of spaces, got Euclidean"),
        (Product(8), (1.0,), "expected one for each of 2 factors"),
    ):
        with pytest.raises(ValueError, match=message):
            PerFactor(space, loss=MultiSimilarity.Config(), weights=weights)
    text = (
        "dataset: {name: glyphs}\nloss: {name: per_factor, loss: {name: mpa, transport: {}, negative_fraction: 0.5}}\n"
    )
    with pytest.raises(UserError) as error:
        parse_recipe(text, "r.yaml")
    assert str(error.value).split("\n") == [
        "r.yaml:2: loss: per_factor needs manifold.name product, got sphere, because it computes a loss on each factor",
        "r.yaml:2: loss.loss: mpa needs loss.negative_fraction 1.0, got 0.5, because the transport plans of grouplets "
        "need the proxies of all classes",
    ]
    nested = "dataset: {name: glyphs}\nloss: {name: matryoshka, loss: {name: proxy_gml}}\nmanifold: {name: sphere}\n"
    assert parse_recipe(nested, "r.yaml").loss.name == "matryoshka"  # it has no negative_fraction
    scaled = "dataset: {name: glyphs}\nloss: {name: per_factor}\nmanifold: {name: product, learnable_scales: true}\n"
    refuses(r"needs manifold.learnable_scales False, got True, because", parse_recipe, scaled, "r.yaml")


def test_a_loss_per_factor_requires_of_every_factor_what_it_requires_of_the_space():
    """A recipe is accepted where Python builds the loss, and the factor that does not fit is named."""
    text = "dataset: {{name: glyphs}}\nembedding_dim: 8\nmanifold: {}\nloss: {{name: per_factor, loss: {}}}\n"
    spheres = "{name: product, factors: [{name: sphere}, {name: sphere}]}"
    balls = "{name: product, factors: [{name: sphere}, {name: poincare}]}"
    for loss, refused in (
        ("{name: arcface}", "needs manifold.factors.1.similarity cosine or origin_cosine, got negative_distance"),
        ("{name: circle}", "needs manifold.factors.1.similarity cosine, got negative_distance"),
        ("{name: proxy_gml}", "needs manifold.factors.1.similarity cosine or"),
        ("{name: margin}", "distance_weighted needs manifold.factors.1.name sphere, got poincare"),
        ("{name: matryoshka, dims: [4, 2]}", None),
    ):
        recipe = parse_recipe(text.format(spheres, loss), "r.yaml")
        assert recipe.loss.build(recipe.manifold.build(8), 30).columns == 8
        if refused:
            refuses(refused, parse_recipe, text.format(balls, loss), "r.yaml")
        else:
            parse_recipe(text.format(balls, loss), "r.yaml")
