"""The contract of manifolds."""

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold, ManifoldConfig, Side
from dmlkit.nearest.search import Gallery
from dmlkit.testing.promise import Promise, changed, expect, expect_close, expect_refused, hold, title
from dmlkit.vectors.index_vectors import index_vectors
from dmlkit.vectors.manifest import index_of

DIM = 6


def check_manifold(config: ManifoldConfig) -> None:
    """Check a manifold with its similarity against its contract.

    d(x, x) is exactly 0; distance is a metric; gradients are finite from the origin to the boundary and agree with
    finite differences; paired and matrix forms agree; the vectors for indexes rank as the similarity does; points map
    back to their features; proxies are points; the state_dict restores the geometry.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> check_manifold(Sphere.Config(similarity="cosine"))
    """
    hold(MANIFOLD, title(config), config)


def features(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Return random features (..., d)."""
    return scale * torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(seed))


def the_class_defaults_are_the_configs(config: ManifoldConfig) -> None:
    """Check that the class without options equals what the configuration without options builds."""
    if any(field.is_required() for field in type(config).model_fields.values()):
        return
    built = type(config).model_validate({}).build(DIM)
    default: Manifold = type(built)(DIM)  # pyright: ignore[reportCallIssue] - implementations need no other arguments
    expect(default.similarity_name == built.similarity_name, f"similarity {default.similarity_name}")
    expect(default.proxies == built.proxies, f"proxies {default.proxies}")
    x, y = features(4), features(5, seed=1)
    similarities = default.similarity(default.from_features(x), default.from_features(y))
    expected = built.similarity(built.from_features(x), built.from_features(y))
    expect(torch.equal(similarities, expected), "similarities differ")


def distance_to_itself_is_zero(config: ManifoldConfig) -> None:
    """Check that the distance of a point to itself is exactly 0, with a finite gradient."""
    manifold = config.build(DIM)
    for scale in (1e-3, 1.0, 100.0):
        raw = features(50, scale=scale).requires_grad_()
        points = manifold.from_features(raw)
        distance = manifold.distance(points, points)
        expect((distance.diagonal() == 0).all(), f"features of size {scale}: distance is not 0")
        expect((manifold.paired_distance(points, points) == 0).all(), f"features of size {scale}: paired is not 0")
        (gradient,) = torch.autograd.grad(distance.sum(), raw)
        expect(gradient.isfinite().all(), f"features of size {scale}: a gradient has nan or inf")


def gradients_are_finite_everywhere(config: ManifoldConfig) -> None:
    """Check that similarities and their gradients are finite from the origin to the clipped boundary."""
    manifold = config.build(DIM)
    directions = torch.nn.functional.normalize(features(8), dim=1)
    for length in (0.0, 1e-20, 1e-3, 2.3, 50.0, 1e6):
        raw = (length * directions).requires_grad_()
        points = manifold.from_features(raw)
        values = manifold.similarity(points, manifold.from_features(features(5, seed=1)))
        (gradient,) = torch.autograd.grad(values.sum(), raw)
        expect(values.isfinite().all(), f"features of length {length}: a similarity has nan or inf")
        expect(gradient.isfinite().all(), f"features of length {length}: a gradient has nan or inf")


def distance_is_a_metric(config: ManifoldConfig) -> None:
    """Check that distances are symmetric, non-negative, and satisfy the triangle inequality."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-3, 0.1, 1.0, 3.0):
        triangles = scale * torch.randn(10, 3, DIM, generator=generator, dtype=torch.float64)
        for triangle in triangles:
            expect_metric(config, triangle)


def expect_metric(config: ManifoldConfig, triangle: Tensor) -> None:
    """Check the metric axioms for the distances of three points, given by features (3, d) in float64."""
    manifold = config.build(DIM).double()
    points = manifold.from_features(triangle)
    distance = manifold.distance(points, points)
    expect(torch.allclose(distance, distance.T, atol=1e-6), f"distances are not symmetric: {distance.tolist()}")
    expect((distance >= 0).all(), f"a distance is negative: {distance.tolist()}")
    through_third = distance[:, :, None] + distance[None, :, :]  # d(x, z) + d(z, y) at [x, z, y]
    is_shortest = (distance[:, None, :] <= through_third + 1e-6).all()
    expect(is_shortest, f"the triangle inequality is violated: {distance.tolist()}")


def the_paired_form_equals_the_matrix_form(config: ManifoldConfig) -> None:
    """Check that paired similarities and distances equal those of the matrix form."""
    manifold = config.build(DIM).double()
    x, y = manifold.from_features(features(7).double()), manifold.from_features(features(9, seed=1).double())
    pairs = (x[:, None], y)
    expect_close(manifold.paired_similarity(*pairs), manifold.similarity(x, y), "similarity", atol=1e-9, rtol=1e-5)
    expect_close(manifold.paired_distance(*pairs), manifold.distance(x, y), "distance", atol=1e-9, rtol=1e-5)


def gradients_agree_with_finite_differences(config: ManifoldConfig) -> None:
    """Check that the gradient of the similarity agrees with finite differences."""
    manifold = config.build(DIM).double()

    def of_features(x: Tensor, y: Tensor) -> Tensor:
        return manifold.similarity(manifold.from_features(x), manifold.from_features(y))

    inputs = (features(3).double().requires_grad_(), features(4, seed=1).double().requires_grad_())
    expect(torch.autograd.gradcheck(of_features, inputs), "the gradients differ")


def index_vectors_rank_as_the_similarity(config: ManifoldConfig) -> None:
    """Check that inner products of the index vectors order a gallery as the similarity does."""
    manifold = config.build(DIM).double()
    for scale in (0.05, 1.0):
        x = manifold.from_features(features(20, scale=scale).double())
        y = manifold.from_features(features(200, scale=scale, seed=1).double())
        products = manifold.index_vectors(x, "query") @ manifold.index_vectors(y, "gallery").T
        ranked = manifold.paired_similarity(x[:, None], y).gather(1, products.argsort(dim=1, descending=True))
        expect((ranked.diff(dim=1) <= 1e-9).all(), f"features of size {scale}: the order differs")


def the_index_form_is_that_of_the_index_vectors(config: ManifoldConfig) -> None:
    """Check that `dmlkit.vectors.index_vectors` computes the index vectors in NumPy, or that the form is ``own``."""
    bent = {"curvature": -0.7} if "curvature" in type(config).model_fields else {}
    manifold = changed(config, **bent).build(DIM).double()
    index = index_of(manifold).model_dump(mode="json")
    if index["form"] == "own":
        return
    points = manifold.from_features(torch.cat([features(8), torch.zeros(1, DIM)]).double())
    sides: tuple[Side, ...] = ("query", "gallery")
    for side in sides:
        vectors = torch.from_numpy(index_vectors(points.numpy(), index, side))
        subject = f"{side} vectors of form {index['form']}"
        expect_close(vectors, manifold.index_vectors(points, side), subject, atol=1e-300, rtol=1e-9)


def the_relative_similarity_is_the_similarity_on_another_scale(config: ManifoldConfig) -> None:
    """Check that relative similarities order points as the similarity; from distances, a point with itself has 1."""
    manifold = config.build(DIM).double()
    x, y = (manifold.from_features(features(20, seed=seed).double()) for seed in (0, 1))
    relative, similarity = manifold.relative_similarity(x, y), manifold.similarity(x, y)
    expect(torch.equal(relative.argsort(dim=1), similarity.argsort(dim=1)), "the order differs")
    if manifold.similarity_name.endswith("distance"):
        own = manifold.relative_similarity(x, x).diagonal()
        expect((own == 1).all(), "the relative similarity of a point with itself is not 1")
    else:
        expect(torch.equal(relative, similarity), "it differs from the similarity, which is not a distance")


def the_gallery_finds_what_brute_force_finds(config: ManifoldConfig) -> None:
    """Check that a search finds the nearest neighbors by the exact similarity."""
    manifold = config.build(DIM)
    queries, gallery = manifold.from_features(features(30)), manifold.from_features(features(500, scale=2, seed=1))
    hits = Gallery(manifold, gallery).search(queries, k=20)
    exact = manifold.paired_similarity(queries.double()[:, None], gallery.double()).topk(20)
    expect(torch.equal(hits.indices, exact.indices), "the neighbors differ")
    expect(torch.allclose(hits.similarities, exact.values.float()), "the similarities differ")


def features_come_back_from_points(config: ManifoldConfig) -> None:
    """Check that mapping a point to features and back gives the same point."""
    manifold = config.build(DIM).double()
    points = manifold.from_features(features(8).double())
    expect_close(manifold.from_features(manifold.to_features(points)), points, "points", atol=1e-8, rtol=1e-5)


def the_state_dict_brings_back_the_geometry(config: ManifoldConfig) -> None:
    """Check that a manifold restored from its state_dict is identical, including a learned curvature."""
    learned = {"curvature": -2.5, "learnable_curvature": True} if "curvature" in type(config).model_fields else {}
    fresh = {"learnable_curvature": True} if learned else {}
    manifold, restored = changed(config, **learned).build(DIM), changed(config, **fresh).build(DIM)
    restored.load_state_dict(manifold.state_dict())
    x, y = manifold.from_features(features(4)), manifold.from_features(features(5, seed=1))
    expect(torch.equal(restored.from_features(features(4)), x), "points differ")
    expect(torch.equal(restored.similarity(x, y), manifold.similarity(x, y)), "similarities differ")
    expect(torch.equal(restored.index_vectors(x, "query"), manifold.index_vectors(x, "query")), "index vectors differ")


def fewer_dimensions_keep_everything_else(config: ManifoldConfig) -> None:
    """Check that `Manifold.with_dim` equals the space built with that width, and shares what training changes."""
    fields = type(config).model_fields
    options = {"curvature": -0.3, "learnable_curvature": True, "clip_distance": 0.5, "metric": "arc"}
    config = changed(config, **{key: value for key, value in options.items() if key in fields})
    manifold = config.build(DIM)
    if not manifold.has_prefixes:
        expect_refused(lambda: manifold.with_dim(3), ValueError, "the first 3 of its 6 features are no point", "dim 3")
        return
    shorter, built, raw = manifold.with_dim(3), config.build(3), features(5)[:, :3]
    x, y = shorter.from_features(raw), built.from_features(raw)
    expect(torch.equal(x, y) and shorter.point_dim == built.point_dim, "points differ")
    expect(torch.equal(shorter.similarity(x, x), built.similarity(y, y)), "similarities differ")
    shared = zip(manifold.parameters(), shorter.parameters(), strict=True)
    expect(all(one is other for one, other in shared), "a parameter is not shared")


def proxies_are_points_either_way(config: ManifoldConfig) -> None:
    """Check that proxies are on the manifold, whether stored as features or as points."""
    for proxies in ("features", "points"):
        manifold = changed(config, proxies=proxies).build(DIM)
        points = manifold.proxy_points(manifold.new_proxies(10, 3))
        expect(points.shape == (10, 3, manifold.point_dim), f"{proxies}: got shape {tuple(points.shape)}")
        is_point = manifold.geometry.check_point_on_manifold(points.detach(), atol=1e-4, rtol=1e-4)
        expect(is_point, f"{proxies}: not on the manifold")


def half_precision_features_become_exact_points(config: ManifoldConfig) -> None:
    """Check that features in float16 give the points of float32, to 0.002."""
    manifold = config.build(DIM)
    raw = features(6).half()
    expected = manifold.from_features(raw.float())
    expect_close(manifold.from_features(raw).float(), expected, "points", atol=2e-3, rtol=1e-5)


def bad_arguments_are_refused(config: ManifoldConfig) -> None:
    """Check that dim 0 and an unknown similarity raise a ValueError that says so."""
    kind: type[Manifold] = type(config.build(DIM))
    expect_refused(lambda: config.build(0), ValueError, "dim must be at least 1, got 0", "dim 0")
    pattern = "similarity: got 'cosinus', expected '"
    expect_refused(lambda: kind(DIM, similarity="cosinus"), ValueError, pattern, "cosinus")  # pyright: ignore[reportCallIssue]


MANIFOLD: tuple[Promise, ...] = (
    the_class_defaults_are_the_configs,
    distance_to_itself_is_zero,
    gradients_are_finite_everywhere,
    distance_is_a_metric,
    the_paired_form_equals_the_matrix_form,
    gradients_agree_with_finite_differences,
    index_vectors_rank_as_the_similarity,
    the_index_form_is_that_of_the_index_vectors,
    the_relative_similarity_is_the_similarity_on_another_scale,
    the_gallery_finds_what_brute_force_finds,
    features_come_back_from_points,
    the_state_dict_brings_back_the_geometry,
    fewer_dimensions_keep_everything_else,
    proxies_are_points_either_way,
    half_precision_features_become_exact_points,
    bad_arguments_are_refused,
)
