"""The optimizer interface: one learning rate, multiplied for backbone, head and loss."""

from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat
from torch import nn
from torch.optim import Optimizer

from dmlkit.component import ComponentConfig


class LearningRateMultipliers(BaseModel, frozen=True, extra="forbid", strict=True):
    """How much faster than ``lr`` backbone, head and loss learn."""

    backbone: PositiveFloat = 1.0
    """Smaller than 1 keeps pretrained weights near where they were."""
    head: PositiveFloat = 1.0
    """Of the layer between features and embedding."""
    loss: PositiveFloat = 1.0
    """Proxies see few gradients and need a larger step: 100 is usual."""


class OptimizerConfig(ComponentConfig, frozen=True):
    """Root of the optimizer family."""

    lr: PositiveFloat = 1e-3
    """Learning rate, before multipliers and schedule."""
    weight_decay: NonNegativeFloat = 1e-4
    """Share of a weight, times the learning rate, that each step takes off; proxies included."""
    lr_multipliers: LearningRateMultipliers = LearningRateMultipliers()
    """How much faster than ``lr`` backbone, head and loss learn."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The learning rate of each block of the backbone over that of what follows it, e.g. 0.75 for a large pretrained
    ViT: what is near the pixels then stays near its pretrained weights."""

    def build(self, parameters: dict[str, list[nn.Parameter]], *, fused: bool = False) -> Optimizer:
        """The optimizer over the parameters of ``backbone``, ``head`` and ``loss``.

        Args:
            parameters: by that name; those of a backbone's block by ``backbone.N``, where N counts from the head.
            fused: one kernel for all of a step, where there is one: 12 ms instead of 38 for 17 million numbers on 2
                CPU cores. Fused steps scale float16 gradients themselves, which rules out clipping them.
        """
        raise NotImplementedError

    def groups(self, parameters: dict[str, list[nn.Parameter]]) -> list[dict[str, Any]]:
        """One group for each of them with any parameters, named, with its own learning rate."""
        rates = {name: self.lr * self._multiplier(*name.split(".")) for name in parameters}
        return [{"params": group, "name": name, "lr": rates[name]} for name, group in parameters.items() if group]

    def _multiplier(self, part: str, depth: str = "0") -> float:
        return getattr(self.lr_multipliers, part) * self.layer_decay ** int(depth)
