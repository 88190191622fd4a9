"""Product spaces against geoopt, sums over the factors, Minkowski inner products and finite differences."""

from pathlib import Path

import geoopt
import pytest
import torch

from dmlkit.errors import UserError
from dmlkit.manifolds import Euclidean, Lorentz, Manifold, Poincare, Product, Sphere
from dmlkit.manifolds.base import find_invalid_point, frechet_mean
from dmlkit.recipe.file import parse_recipe
from dmlkit.training.experiment import assemble
from tests.conftest import TINY_RECIPE, refuses

FACTORS = (
    Poincare.Config(curvature=-0.7, clip_distance=None),
    Sphere.Config(metric="arc"),
    Euclidean.Config(),
    Lorentz.Config(curvature=-1.3, clip_distance=None),
)
WIDTHS, SCALES = (3, 4, 2, 3), (0.5, 1.5, 0.8, 1.2)


def space(**options: object) -> Product:
    chosen = {"factors": FACTORS, "widths": WIDTHS, "scales": SCALES} | options
    return Product(12, **chosen).double()


def alone() -> list[Manifold]:
    return [config.build(width).double() for config, width in zip(FACTORS, WIDTHS, strict=True)]


def features(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts_of(features: torch.Tensor) -> list[torch.Tensor]:
    return [part.from_features(own) for part, own in zip(alone(), features.split(WIDTHS, 1), strict=True)]


def test_points_are_those_of_the_factors_side_by_side():
    product, raw = space(), features(7, 0)
    points = product.from_features(raw)
    assert product.point_dim == points.shape[1] == 13
    torch.testing.assert_close(points, torch.cat(parts_of(raw), 1), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(product.to_features(points)[:, :3], raw[:, :3])
    off = points.clone()
    off[4, 5] += 0.5  # on the sphere
    invalid = find_invalid_point(product, off)
    assert invalid is not None and invalid[0] == 4 and invalid[1].startswith("factor 1 (sphere): its length is")


def test_the_distance_is_that_of_geoopt():
    product = space(scales=None)
    x, y = (product.from_features(features(6, seed)) for seed in (1, 2))
    theirs = geoopt.ProductManifold(
        (geoopt.Stereographic(k=-0.7).double(), 3),
        (geoopt.Sphere(), 4),
        (geoopt.Euclidean(ndim=1), 2),
        (geoopt.Lorentz(k=1 / 1.3).double(), 4),
    )
    expected = theirs.dist(x[:, None], y[None])
    torch.testing.assert_close(product.distance(x, y), expected, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(product.paired_distance(x[:, None], y), expected, rtol=1e-7, atol=1e-9)
    assert theirs.check_point_on_manifold(x)


def test_distance_and_chords_are_sums_over_the_factors():
    """The chord of each factor is the straight line between its points, with Minkowski's inner product on the sheet."""
    product, (raw, other) = space(), (features(5, 3), features(4, 4))
    x, y = product.from_features(raw), product.from_features(other)
    ball, sphere, flat, sheet = alone()
    lifted = [Lorentz(3, curvature=-0.7, clip_distance=None).double().from_features(one[:, :3]) for one in (raw, other)]
    sides = [parts_of(raw), parts_of(other)]
    for i in range(5):
        for j in range(4):
            (p, s, e, h), (q, t, f, g) = ([part[row] for part in side] for side, row in zip(sides, (i, j), strict=True))
            distances = [
                m.paired_distance(a, b) for m, a, b in ((ball, p, q), (sphere, s, t), (flat, e, f), (sheet, h, g))
            ]
            total = sum(float(rho * d) ** 2 for rho, d in zip(SCALES, distances, strict=True))
            assert float(product.distance(x[i : i + 1], y[j : j + 1])) == pytest.approx(total**0.5, rel=1e-6)
            lines = [lifted[0][i] - lifted[1][j], s - t, e - f, h - g]
            signs = [[-1, 1, 1, 1], [1] * 4, [1] * 2, [-1, 1, 1, 1]]
            chords = [
                float((torch.tensor(sign) * line.square()).sum()) for sign, line in zip(signs, lines, strict=True)
            ]
            squared = sum(rho**2 * chord for rho, chord in zip(SCALES, chords, strict=True))
            found = product.similarity(x[i : i + 1], y[j : j + 1])
            assert float(found) == pytest.approx(-(squared**0.5), rel=1e-6)
    squared_space = space(similarity="negative_squared_chordal_distance")
    torch.testing.assert_close(squared_space.similarity(x, y), -product.similarity(x, y).square())


def test_index_vectors_give_half_the_squared_chord_up_to_a_number_of_each_query():
    product = space(similarity="negative_squared_chordal_distance")
    x, y = product.from_features(features(5, 5)), product.from_features(features(30, 6))
    products = product.index_vectors(x, "query") @ product.index_vectors(y, "gallery").T
    rest = 2 * products - product.similarity(x, y)
    torch.testing.assert_close(rest, rest[:, :1].expand_as(rest), rtol=1e-9, atol=1e-9)


def test_one_factor_next_to_a_constant_one_is_that_factor():
    product = Product(5, factors=(Sphere.Config(), Euclidean.Config()), widths=(4, 1)).double()
    raw = torch.cat([features(6, 7)[:, :4], torch.zeros(6, 1, dtype=torch.float64)], 1)
    points = product.from_features(raw)
    torch.testing.assert_close(product.distance(points, points), Sphere(4).distance(points[:, :4], points[:, :4]))


def test_curvatures_and_scales_learn_by_the_gradient_of_finite_differences():
    learned = tuple(
        config.model_copy(update={"learnable_curvature": True}) if "curvature" in type(config).model_fields else config
        for config in FACTORS
    )
    product = space(factors=learned, learnable_scales=True)
    names = [name for name, parameter in product.named_parameters() if parameter.requires_grad]
    assert len(names) == 3 and "log_scales" in names
    raw, other = features(3, 8), features(4, 9)

    def value(*parameters: torch.Tensor) -> torch.Tensor:
        def both(features: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
            x, y = product.from_features(features), product.from_features(others)
            return torch.cat([product.relative_similarity(x, y), product.distance(x, y)])

        product.forward = both
        return torch.func.functional_call(product, dict(zip(names, parameters, strict=True)), (raw, other))

    given = [product.get_parameter(name).detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(value, given)


def test_learned_values_are_options_of_a_new_space():
    product = Product(
        4, factors=(Poincare.Config(learnable_curvature=True), Sphere.Config()), learnable_scales=True
    ).double()
    with torch.no_grad():
        for parameter in product.parameters():
            parameter.add_(0.3)
    again = Product.Config(learnable_scales=True).model_copy(update=product.learned_options()).build(4).double()
    raw = torch.randn(5, 4, dtype=torch.float64)
    points = product.from_features(raw)
    torch.testing.assert_close(again.from_features(raw), points, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        again.similarity(points, points), product.similarity(points, points), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("metric", ["chord", "arc"])
def test_the_frechet_mean_is_that_of_each_factor_and_no_point_nearby_is_nearer_to_all(metric: str):
    spheres = FACTORS[0], Sphere.Config.model_validate({"metric": metric}), *FACTORS[2:]
    product, raw = space(factors=spheres, scales=(0.1, 3.0, 0.8, 12.0)), features(9, 10)
    raw[:, 3] += 4  # points within half a sphere have one mean
    spaces, points = alone(), product.from_features(raw)
    spaces[1] = spheres[1].model_copy(update={"similarity": "negative_distance"}).build(4)
    mean = frechet_mean(product, points)
    expected = [frechet_mean(part, own) for part, own in zip(spaces, parts_of(raw), strict=True)]
    torch.testing.assert_close(mean, torch.cat(expected), rtol=1e-9, atol=1e-9)
    nearby = product.to_features(mean) + torch.cat([size * features(200, 11) for size in (1e-3, 0.1, 1.0)])
    spreads = product.paired_distance(product.from_features(nearby)[:, None], points).square().sum(1)
    assert (spreads > product.paired_distance(mean, points).square().sum()).all()


SPHERES = "[{name: sphere}, {name: sphere}]"


@pytest.mark.parametrize(
    ("manifold", "message"),
    [
        ("factors: [{name: sphere}]", "manifold.factors: got [{'name': 'sphere'}], expected at least 2 items"),
        ("factors: [{name: sphere}, {name: product}]", "manifold.factors: factor 1 is a product; list its factors"),
        (
            "factors: [{name: sphere, similarity: negative_distance}, {name: sphere}]",
            "manifold.factors: factor 0 (sphere) has a similarity of its own; set manifold.similarity instead",
        ),
        ("factors: [{name: spher}, {name: sphere}]", "manifold.factors.0.name: unknown manifold 'spher'; did you mean"),
        (f"factors: {SPHERES}, scales: [1, -1]", "manifold.scales.1: got -1, expected greater than 0"),
        (f"factors: {SPHERES}, scales: [1]", "manifold.scales: got 1 numbers for 2 factors; give one each"),
        (f"factors: {SPHERES}, widths: [3, 3, 2]", "manifold.widths: got 3 numbers for 2 factors; give one each"),
        (f"factors: {SPHERES}, widths: [3, 4]", "manifold.widths: [3, 4] add up to 7, expected 8"),
        (
            "factors: [{name: sphere}, {name: sphere}, {name: euclidean}]",
            "manifold.widths: 3 factors cannot share 8 dimensions equally; set it",
        ),
    ],
)
def test_recipes_that_are_no_product(manifold: str, message: str):
    text = "dataset: {name: glyphs, classes: 8}\nembedding_dim: 8\nloss: {name: triplet}\n"
    text += f"manifold: {{name: product, {manifold}}}\n"
    with pytest.raises(UserError) as raised:
        assemble(parse_recipe(text, "r.yaml"))
    assert str(raised.value).startswith(f"r.yaml:4: {message}")


def test_matryoshka_refuses_a_product():
    text = "dataset: {name: glyphs}\nmanifold: {name: product}\nloss: {name: matryoshka}\n"
    refuses(r"matryoshka needs manifold.name euclidean or lorentz or poincare or sphere", parse_recipe, text, "r.yaml")


@pytest.mark.slow
def test_a_run_on_a_product_is_evaluated_searched_and_exported(tmp_path, monkeypatch, dmlkit):
    monkeypatch.chdir(tmp_path)
    factors = "[{name: poincare, learnable_curvature: true}, {name: sphere}]"
    Path("r.yaml").write_text(TINY_RECIPE)
    changes = f"manifold={{name: product, factors: {factors}, learnable_scales: true}}"
    assert dmlkit("train", "r.yaml", "-o", "run", "--set", changes, "--set", "training.epochs=1").code == 0
    assert dmlkit("embed", "run", "--split", "test", "-o", "points").code == 0
    values = [dmlkit("eval", source, "--metric", "map@r", "--json") for source in ("run", "points")]
    assert [result.code for result in values] == [0, 0]
    assert values[0].out.split('"metrics"')[1][:60] == values[1].out.split('"metrics"')[1][:60]
    for words in (("export", "points", "--format", "faiss"), ("export", "run", "--format", "onnx")):
        assert dmlkit(*words).code == 0
