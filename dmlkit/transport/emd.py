"""Exact optimal transport by POT's network simplex."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmlkit.transport.base import TransportSolver, check_installed


class Emd(TransportSolver, name="emd"):
    """Earth mover's distance plan by POT's network simplex (Bonneel et al. 2011), for large single problems.

    Needs pip install 'dmlkit[transport]'.

    The linear program by `ot.emd`, one problem at a time on the CPU.

    **Gradient: zero, and the plan is returned without one**, as for `Exact`.

    Raises:
        ValueError: POT is not installed.

    Example:
        >>> Emd().plan(torch.tensor([[[0.0, 1.0], [0.1, 9.0]]]), torch.ones(1, 2), torch.ones(1, 2))
        tensor([[[0., 1.],
                 [1., 0.]]])
    """

    def __post_init__(self) -> None:
        check_installed("ot", "POT", "emd")

    @torch.no_grad()
    def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        import ot

        emd: Any = ot.emd
        # With a negative cost in a 1 x 1 problem POT 0.9.7 reports "infeasible"; a constant does not change the plan.
        positive = cost - cost.amin((1, 2), keepdim=True)
        arrays = zip(rows.cpu().numpy(), cols.cpu().numpy(), positive.cpu().numpy(), strict=True)
        plans = [emd(*problem) if problem[0].any() else np.zeros(cost.shape[1:]) for problem in arrays]
        return torch.from_numpy(np.stack(plans)).to(cost)
