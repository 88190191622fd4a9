"""What is a point of a manifold and what is none, against closed forms in float64 and what dmlkit itself makes."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Sphere, base
from dmlkit.manifolds.base import Manifold, check_points, find_invalid_point

CURVATURES = (-1e-4, -1.0, -50.0)


def manifolds(dim: int) -> list[Manifold]:
    curved = [kind(dim, curvature=k, clip_distance=None) for kind in (Poincare, Lorentz) for k in CURVATURES]
    return [Sphere(dim), Euclidean(dim), *curved]


def off_by_closed_form(manifold: Manifold, points: Tensor) -> np.ndarray:
    x = points.detach().numpy().astype(np.float64)
    match manifold:
        case Sphere():
            return np.abs(np.sqrt((x**2).sum(1)) - 1)
        case Poincare():
            inside = -float(manifold.curvature) * (x**2).sum(1)
            return np.where(inside < 1, 0, np.sqrt(inside))
        case Lorentz():
            time = np.sqrt((x[:, 1:] ** 2).sum(1) - 1 / float(manifold.curvature))
            return np.abs(x[:, 0] - time) / time
        case _:
            return np.zeros(len(x))


@pytest.mark.parametrize("dim", [2, 2048])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_all_that_we_make_are_points_from_the_origin_to_the_edge(dim: int, dtype: torch.dtype):
    """Also where they were kept in half precision in between, and read as float32."""
    directions = torch.randn(20, dim, generator=torch.Generator().manual_seed(dim))
    directions /= directions.norm(dim=1, keepdim=True)
    made = torch.float64 if dtype == torch.float64 else torch.float32
    for manifold in manifolds(dim):
        shortest = 1e-5 if isinstance(manifold, Sphere) else 0.0
        for length in (shortest, 1e-3, 1.0, 7.0, 1e3, 1e12):
            kept = manifold.from_features((length * directions).to(made)).detach().to(dtype)
            if not kept.isfinite().all():  # above 65 504 in float16: of another order than embeddings
                continue
            for read in (kept, kept.float()):
                assert find_invalid_point(manifold, read) is None, (manifold, length)


def test_how_far_off_is_that_of_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    for manifold in manifolds(6):
        points = manifold.from_features(torch.randn(50, 6, generator=generator)).detach()
        points *= 1 + torch.randn(50, 1, generator=generator).abs() * torch.logspace(-3, 3, 50)[:, None]
        expected = off_by_closed_form(manifold, points)
        assert manifold.distance_off(points).detach().numpy() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        faulty = np.flatnonzero(expected > 0.01)
        invalid = find_invalid_point(manifold, points)
        assert (invalid is None and len(faulty) == 0) or (invalid is not None and invalid[0] == faulty[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_boundary_of_the_ball_is_outside(dtype: torch.dtype):
    ball, step = Poincare(3), torch.finfo(dtype).eps
    for length in (1.0, 1 + 2 * step, 1.5, 1e30):
        row, what = find_invalid_point(ball, torch.tensor([[0.5, 0, 0], [0, length, 0]], dtype=dtype)) or (-1, "")
        assert row == 1 and "shorter than its radius of 1" in what
    assert find_invalid_point(ball, torch.tensor([[0, 1 - 2 * step, 0]], dtype=dtype)) is None


@pytest.mark.parametrize(
    ("manifold", "value"), list(product([Sphere(3), Euclidean(3), Poincare(3), Lorentz(3)], [np.nan, np.inf, -np.inf]))
)
def test_the_first_faulty_row_of_all_blocks_is_named(manifold: Manifold, value: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "ROWS", 3)
    points = manifold.from_features(torch.ones(11, 3)).detach()
    points[7, 2], points[9, 0] = value, value
    assert find_invalid_point(manifold, points) == (7, "its embedding has nan or inf")
    assert find_invalid_point(manifold, points[:7]) is None and find_invalid_point(manifold, points[:0]) is None
    with pytest.raises(UserError, match=r"^photo 7: its embedding has nan or inf; embed again$"):
        check_points(manifold, points, "photo {}".format, "embed again")


def test_rows_whose_products_overflow_are_no_points():
    huge = torch.full((2, 3), 3e38)
    too_long = "its largest coordinate is 3e+38, and inner products overflow above 1e+16"
    assert find_invalid_point(Euclidean(3), huge) == find_invalid_point(Euclidean(3), -huge.double()) == (0, too_long)
    sheet = torch.tensor([[1e15, 0, 1e15], [2e16, 0, 2e16]])
    assert find_invalid_point(Lorentz(2), sheet) == (1, too_long.replace("3e+38", "2e+16"))
    edge = torch.full((2, 3), -1e16)
    assert find_invalid_point(Euclidean(3), edge) is None and (edge @ edge.T).isfinite().all()
    assert find_invalid_point(Sphere(3), huge) == (
        0,
        "its length is 5.196e+38, where points of the sphere have length 1",
    )
    assert "its x_0 is 3e+38, where the point of the hyperboloid has 4.243e+38" in str(
        find_invalid_point(Lorentz(2), huge)
    )
    assert find_invalid_point(Sphere(3), torch.zeros(1, 3)) == (
        0,
        "its length is 0, where points of the sphere have length 1",
    )
