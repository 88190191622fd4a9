"""How many items of a row score above each of a few scores, and how many score the same."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

COUNTED = (
    8  # thresholds up to which comparing a row with each is cheaper than sorting it: 44 us against 426 at N=60 502
)


def standing(products: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Count the entries of each row above and at each score. Rows of ``products`` may come back sorted.

    Args:
        products: (n, N).
        scores: (n, J), entries of the rows in descending order, padded with -inf.

    Returns:
        above, tied: (n, J) int64; N and 1 where the score is -inf.

    Example:
        >>> above, tied = standing(torch.tensor([[3.0, 1.0, 2.0, 2.0]]), torch.tensor([[2.0, 1.0, -torch.inf]]))
        >>> above.tolist(), tied.tolist()
        ([[1, 3, 4]], [[2, 1, 1]])
    """
    absent = scores == -torch.inf
    above, reached = _on_cpu(products, scores) if products.device.type == "cpu" else _on_gpu(products, scores)
    above = above.masked_fill(absent, products.shape[1])
    return above, (reached - above).masked_fill(absent, 1)


def _on_gpu(products: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    if scores.shape[1] <= COUNTED:
        columns = scores.unbind(1)
        above = torch.stack([(products > score[:, None]).sum(1) for score in columns], 1)
        return above, torch.stack([(products >= score[:, None]).sum(1) for score in columns], 1)
    ascending, ascending_scores = products.sort(1).values, scores.contiguous()
    above = products.shape[1] - torch.searchsorted(ascending, ascending_scores, right=True)
    return above, products.shape[1] - torch.searchsorted(ascending, ascending_scores)


def _on_cpu(products: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Row by row with NumPy, whose comparing, counting and sorting are vectorised, on torch's number of threads."""
    import numpy as np

    table, levels = products.numpy(), scores.numpy()
    present = (levels > -np.inf).sum(1).tolist()
    above = np.zeros(levels.shape, dtype=np.int64)
    reached = np.zeros(levels.shape, dtype=np.int64)

    def work(rows: range) -> None:
        mask = np.empty(table.shape[1], dtype=np.bool_)
        for row in rows:
            _stand(table[row], levels[row, : present[row]], above[row], reached[row], mask)

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [range(first, len(table), threads) for first in range(threads)]))
    return torch.from_numpy(above), torch.from_numpy(reached)


def _stand(row: Any, levels: Any, above: Any, reached: Any, mask: Any) -> None:
    import numpy as np

    if len(levels) > COUNTED:
        row.sort()
        above[: len(levels)] = len(row) - row.searchsorted(levels, "right")
        reached[: len(levels)] = len(row) - row.searchsorted(levels, "left")
        return
    for j, level in enumerate(levels):
        above[j] = np.count_nonzero(np.greater(row, level, out=mask))
        reached[j] = np.count_nonzero(np.greater_equal(row, level, out=mask))
