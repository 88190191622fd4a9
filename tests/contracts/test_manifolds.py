"""What every manifold promises, for every registered member and each of its similarities."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dmlkit.embedding.index_vectors import index_vectors
from dmlkit.embedding.manifest import index_of
from dmlkit.embedding.search import Gallery
from dmlkit.manifolds.base import Manifold, ManifoldConfig, Side

DIM = 6
NAMES = sorted(ManifoldConfig.variants)


def similarities(name: str) -> list[str]:
    return [str(choice) for choice in ManifoldConfig.variants[name].model_fields["similarity"].annotation.__args__]


CASES = [(name, similarity) for name in NAMES for similarity in similarities(name)]


def build(name: str, similarity: str | None = None, **options: object) -> Manifold:
    chosen = {} if similarity is None else {"similarity": similarity}
    return ManifoldConfig.variants[name](**chosen, **options).build(DIM)


def features(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_the_class_defaults_are_the_configs(name: str):
    config = ManifoldConfig.variants[name]()
    default, built = type(config.build(DIM))(DIM), config.build(DIM)
    assert default.similarity_name == built.similarity_name
    assert default.proxies == built.proxies
    x, y = features(4), features(5, seed=1)
    assert torch.equal(
        default.similarity(default.from_features(x), default.from_features(y)),
        built.similarity(built.from_features(x), built.from_features(y)),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_distance_to_itself_is_zero_with_a_finite_gradient(name: str, scale: float):
    manifold = build(name)
    raw = features(50, scale=scale).requires_grad_()
    points = manifold.from_features(raw)
    distance = manifold.distance(points, points)
    assert distance.diagonal().tolist() == [0.0] * 50
    assert manifold.paired_distance(points, points).tolist() == [0.0] * 50
    (gradient,) = torch.autograd.grad(distance.sum(), raw)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("name", "similarity"), CASES)
@pytest.mark.parametrize("length", [0.0, 1e-20, 1e-3, 2.3, 50.0, 1e6])
def test_gradients_are_finite_from_the_origin_to_the_clipped_boundary(name: str, similarity: str, length: float):
    manifold = build(name, similarity)
    directions = torch.nn.functional.normalize(features(8), dim=1)
    raw = (length * directions).requires_grad_()
    points = manifold.from_features(raw)
    values = manifold.similarity(points, manifold.from_features(features(5, seed=1)))
    (gradient,) = torch.autograd.grad(values.sum(), raw)
    assert values.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.lists(st.floats(-3, 3, width=32), min_size=3 * DIM, max_size=3 * DIM))
def test_distance_is_a_metric(name: str, data: list[float]):
    manifold = build(name).double()
    points = manifold.from_features(torch.tensor(data, dtype=torch.float64).view(3, DIM) + 1e-3)
    distance = manifold.distance(points, points)
    assert torch.allclose(distance, distance.T, atol=1e-6)
    assert (distance >= 0).all()
    through_third = distance[:, :, None] + distance[None, :, :]  # d(x, z) + d(z, y) at [x, z, y]
    assert (distance[:, None, :] <= through_third + 1e-6).all()


@pytest.mark.parametrize(("name", "similarity"), CASES)
def test_the_paired_form_equals_the_matrix_form(name: str, similarity: str):
    manifold = build(name, similarity).double()
    x, y = manifold.from_features(features(7).double()), manifold.from_features(features(9, seed=1).double())
    pairs = (x[:, None], y)
    assert torch.allclose(manifold.similarity(x, y), manifold.paired_similarity(*pairs), atol=1e-9)
    assert torch.allclose(manifold.distance(x, y), manifold.paired_distance(*pairs), atol=1e-9)


@pytest.mark.parametrize(("name", "similarity"), CASES)
def test_gradients_agree_with_finite_differences(name: str, similarity: str):
    manifold = build(name, similarity).double()

    def of_features(x: Tensor, y: Tensor) -> Tensor:
        return manifold.similarity(manifold.from_features(x), manifold.from_features(y))

    inputs = (features(3).double().requires_grad_(), features(4, seed=1).double().requires_grad_())
    assert torch.autograd.gradcheck(of_features, inputs)


@pytest.mark.parametrize(("name", "similarity"), CASES)
@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_index_vectors_order_as_the_similarity(name: str, similarity: str, scale: float):
    manifold = build(name, similarity).double()
    x = manifold.from_features(features(20, scale=scale).double())
    y = manifold.from_features(features(200, scale=scale, seed=1).double())
    products = manifold.index_vectors(x, "query") @ manifold.index_vectors(y, "gallery").T
    ranked = manifold.paired_similarity(x[:, None], y).gather(1, products.argsort(dim=1, descending=True))
    assert (ranked.diff(dim=1) <= 1e-9).all()


@pytest.mark.parametrize(("name", "similarity"), CASES)
def test_index_vectors_in_numpy_are_those_of_the_manifold_s9(name: str, similarity: str):
    bent = {"curvature": -0.7} if "curvature" in ManifoldConfig.variants[name].model_fields else {}
    manifold = build(name, similarity, **bent).double()
    points = manifold.from_features(torch.cat([features(8).double(), torch.zeros(1, features(1).shape[1]).double()]))
    told = json.loads(index_of(manifold).model_dump_json())
    sides: tuple[Side, ...] = ("query", "gallery")
    for side in sides:
        in_numpy = index_vectors(points.numpy(), told, side)
        np.testing.assert_allclose(in_numpy, manifold.index_vectors(points, side).numpy(), rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("name", NAMES)
def test_features_come_back_from_points(name: str):
    manifold = build(name).double()
    points = manifold.from_features(features(8).double())
    assert torch.allclose(manifold.from_features(manifold.to_features(points)), points)


@pytest.mark.parametrize(("name", "similarity"), CASES)
def test_the_gallery_finds_what_brute_force_finds(name: str, similarity: str):
    manifold = build(name, similarity)
    queries, gallery = manifold.from_features(features(30)), manifold.from_features(features(500, scale=2, seed=1))
    found = Gallery(manifold, gallery).search(queries, k=20)
    exact = manifold.paired_similarity(queries.double()[:, None], gallery.double())
    assert torch.equal(found.indices, exact.topk(20).indices)
    assert torch.allclose(found.similarities, exact.topk(20).values.float())


@pytest.mark.parametrize(("name", "similarity"), CASES)
def test_the_state_dict_brings_back_the_geometry(name: str, similarity: str):
    fields = ManifoldConfig.variants[name].model_fields
    learned = {"curvature": -2.5, "learnable_curvature": True} if "curvature" in fields else {}
    fresh = {"learnable_curvature": True} if learned else {}
    manifold, other = build(name, similarity, **learned), build(name, similarity, **fresh)
    other.load_state_dict(manifold.state_dict())
    x, y = manifold.from_features(features(4)), manifold.from_features(features(5, seed=1))
    assert torch.equal(other.from_features(features(4)), x)
    assert torch.equal(other.similarity(x, y), manifold.similarity(x, y))
    assert torch.equal(other.index_vectors(x, "query"), manifold.index_vectors(x, "query"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("proxies", ["features", "points"])
def test_proxies_are_points_either_way(name: str, proxies: str):
    torch.manual_seed(0)
    manifold = build(name, proxies=proxies)
    held = manifold.new_proxies(10, 3)
    points = manifold.proxy_points(held)
    assert points.shape == (10, 3, manifold.point_dim)
    assert manifold.geometry.check_point_on_manifold(points.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_features_become_exact_points(name: str):
    manifold = build(name)
    raw = features(6).half()
    points = manifold.from_features(raw)
    assert torch.allclose(points.float(), manifold.from_features(raw.float()), atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments_are_refused(name: str):
    cls = type(build(name))
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        cls(0)
    with pytest.raises(ValueError, match="similarity 'cosinus' is unknown; expected one of"):
        cls(DIM, similarity="cosinus")
