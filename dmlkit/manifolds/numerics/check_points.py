"""Checks that numbers are points of a manifold, for all embeddings that are read or have just been computed."""

from collections.abc import Callable

import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.manifolds.base import Manifold

# Our own points are off by 4e-7 at most (2 048 dimensions, float32), and all files hold float32. Points that were kept
# in half precision in between are off by the rounding of each coordinate: 2^-11 = 0.0005 in float16 and 2^-8 = 0.004 in
# bfloat16, x_0 of the hyperboloid by twice that. An error within the tolerance changes no cosine by more than 0.02.
TOLERANCE = 0.01
ROWS = 8192  # checked at once: 16 MB at 512 dimensions stay in the cache from one pass to the next


@torch.no_grad()  # the curvature of a manifold may be learned
def find_invalid_point(manifold: Manifold, points: Tensor) -> tuple[int, str] | None:
    """Find the first row of (N, D) that is not a point of a manifold; return its number and a description of the error.

    The result is None if all rows are points. Checking 100 000 x 512 numbers takes 10 ms on the sphere or hyperboloid
    or in a ball, and 20 ms in flat space, in bounded memory.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> find_invalid_point(Sphere(2), torch.tensor([[0.6, 0.8], [3.0, 4.0], [0.0, float("nan")]]))
        (1, 'its length is 5, where points of the sphere have length 1')
    """
    for number, block in enumerate(points.split(ROWS)):
        is_off = ~(manifold.distance_off(block) <= TOLERANCE)  # also where it is nan
        if not is_off.any():
            continue
        rows = is_off.nonzero()[:, 0]
        exact = manifold.distance_off(block[rows].double())  # in float32 a square above 3e38 is infinite
        rows = rows[~(exact <= TOLERANCE)]
        if len(rows):
            point = block[rows[0]]
            error = manifold.describe_off(point) if point.isfinite().all() else "its embedding has nan or inf"
            return number * ROWS + int(rows[0]), error
    return None


def check_points(manifold: Manifold, points: Tensor, name: Callable[[int], str], advice: str) -> None:
    """Check that numbers (N, D) are points of a manifold.

    Args:
        manifold: the geometry.
        points: rows of any floating dtype.
        name: returns the name of a row for the error: its file and its image.
        advice: what the user can do about a row that is not a point.

    Raises:
        UserError: a row is not finite, or not on the manifold.
    """
    error = find_invalid_point(manifold, points)
    if error is not None:
        row, what = error
        raise UserError(f"{name(row)}: {what}; {advice}")
