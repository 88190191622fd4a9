"""Spectrum: over how many directions the embeddings spread."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Points


class SpectrumConfig(MetricConfig, frozen=True):
    r"""Decay of the singular values of the embeddings (Roth et al., ICML 2020, sec. 5) and their effective rank.

    With s the singular values divided by their sum, the decay is :math:`KL(U \| s)`, 0 when all directions are
    used alike, and the effective rank :math:`e^{H(s)}` (Roy & Vetterli, EUSIPCO 2007).
    """

    name: Literal["spectrum"] = "spectrum"
    key: ClassVar[str] = "spectrum"
    definition: ClassVar[str] = (
        "spectral_decay: KL(uniform || singular values), shares below 1e-12 taken as that; "
        "effective_rank: exp of their entropy"
    )
    searches: ClassVar[bool] = False

    def names(self) -> tuple[str, ...]:
        return "spectral_decay", "effective_rank"

    def of_points(self, points: Points) -> dict[str, float]:
        shares = singular_shares(points.embeddings).clamp(min=1e-12)
        decay = -(shares.log() + torch.tensor(float(len(shares))).log()).mean()
        return {"spectral_decay": float(decay), "effective_rank": float(torch.exp(-(shares * shares.log()).sum()))}


def singular_shares(embeddings: Tensor) -> Tensor:
    """The min(N, D) singular values of (N, D), largest first, divided by their sum: float64.

    Example:
        >>> singular_shares(torch.tensor([[3.0, 0.0], [0.0, 1.0]])).tolist()
        [0.75, 0.25]
    """
    rows = embeddings.split(2**14)
    if len(embeddings) < embeddings.shape[1]:
        gram = embeddings.double() @ embeddings.double().T
    else:
        gram = torch.stack([block.double().T @ block.double() for block in rows]).sum(0)
    values = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)
    return values / values.sum().clamp(min=torch.finfo(torch.float64).tiny)
