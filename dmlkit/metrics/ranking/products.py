"""Inner products of many vectors by the fastest available matrix product, in bounded memory."""

import torch
from torch import Tensor

BLOCK_ENTRIES = 2**26  # products held at once: 256 MB in float32
BLOCK_ROWS = 1024  # more rows do not make the product faster (166 GFLOP/s on 2 cores; 128 at 256 rows)


def block_rows(columns: int) -> int:
    """Return how many rows of ``columns`` products to compute at once."""
    return max(1, min(BLOCK_ROWS, BLOCK_ENTRIES // columns))


def inner_products_into(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Compute x y^T of x (n, D) and y (N, D) in the first n rows of ``out``, (n, N).

    The CPU uses NumPy's BLAS: on an AMD EPYC its OpenBLAS does 166 GFLOP/s and torch's MKL 89.

    Example:
        >>> inner_products_into(torch.eye(2), torch.tensor([[3.0, 4.0]]), torch.empty(2, 1)).tolist()
        [[3.0], [4.0]]
    """
    out = out[: len(x)]
    if x.device.type != "cpu":
        return torch.mm(x, y.T, out=out)
    import numpy as np

    np.dot(x.numpy(), y.numpy().T, out=out.numpy())
    return out


def largest_columns(products: Tensor) -> Tensor:
    """Return the column of the largest entry of each row, the first of several, (n,) int64.

    Example:
        >>> largest_columns(torch.tensor([[1.0, 5.0, 5.0]])).tolist()
        [1]
    """
    if products.device.type != "cpu":
        return products.argmax(1)
    return torch.from_numpy(products.numpy().argmax(1))  # 3 us per row of 11 316; torch's takes 18
