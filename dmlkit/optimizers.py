"""Optimizers: one learning rate, multiplied for backbone, head and loss."""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat
from torch import nn
from torch.optim import Optimizer

from dmlkit.component import ComponentConfig, import_on_demand
from dmlkit.manifolds.base import load_geoopt

__all__ = [
    "AdamConfig",
    "AdamWConfig",
    "LearningRateMultipliers",
    "OptimizerConfig",
    "RMSpropConfig",
    "RiemannianAdamConfig",
    "RiemannianSGDConfig",
]


class LearningRateMultipliers(BaseModel, frozen=True, extra="forbid", strict=True):
    """Factors on ``lr`` for backbone, head and loss."""

    backbone: PositiveFloat = 1.0
    """Factor for the backbone; below 1, pretrained weights change less."""
    head: PositiveFloat = 1.0
    """Factor for the layer between features and embedding."""
    loss: PositiveFloat = 1.0
    """Factor for the loss: proxies receive few gradients and need a larger step, usually 100."""


class OptimizerConfig(ComponentConfig, frozen=True):
    """Root of the optimizer family."""

    is_riemannian: ClassVar[bool] = False
    """Whether points stay on their manifold, as ``proxies: points`` needs."""

    lr: PositiveFloat = 1e-3
    """Learning rate, before multipliers and schedule."""
    weight_decay: NonNegativeFloat = 1e-4
    """Fraction of a weight that is added to its gradient (adamw: to its step, times ``lr``); also for proxies."""
    lr_multipliers: LearningRateMultipliers = LearningRateMultipliers()
    """Factors on ``lr`` for backbone, head and loss."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Learning rate of each block of the backbone relative to that of the next one, e.g. 0.75 for a large pretrained
    ViT: blocks near the pixels then change less from their pretrained weights."""

    @abstractmethod
    def build(self, parameters: dict[str, list[nn.Parameter]], *, fused: bool = False) -> Optimizer:
        """Return the optimizer over the parameters of ``backbone``, ``head`` and ``loss``.

        Args:
            parameters: lists by that name; a backbone's block is ``backbone.N``, where N counts from the head.
            fused: use one kernel per step if available: 12 ms instead of 38 ms for 17 million numbers on 2
                CPU cores. Fused steps scale float16 gradients themselves, so those cannot be clipped.
        """

    def groups(self, parameters: dict[str, list[nn.Parameter]]) -> list[dict[str, Any]]:
        """Return one named group for each list with parameters, with its own learning rate."""
        groups: list[dict[str, Any]] = []
        for name, group in parameters.items():
            part, _, depth = name.partition(".")
            multiplier = getattr(self.lr_multipliers, part) * self.layer_decay ** int(depth or 0)
            if group:
                groups.append({"params": group, "name": name, "lr": self.lr * multiplier})
        return groups


class _AdaptiveConfig(OptimizerConfig, frozen=True, abstract=True):
    eps: PositiveFloat = 1e-8
    """Added to the denominator, so that steps stay finite if gradients vanish."""

    def _arguments(self) -> dict[str, Any]:
        return {"lr": self.lr, "weight_decay": self.weight_decay, "eps": self.eps}


class AdamConfig(_AdaptiveConfig, frozen=True):
    """Adam (Kingma & Ba 2015); weight decay is added to the gradient."""

    name: Literal["adam"] = "adam"

    def build(self, parameters: dict[str, list[nn.Parameter]], *, fused: bool = False) -> Optimizer:
        return torch.optim.Adam(self.groups(parameters), fused=fused, **self._arguments())


class AdamWConfig(_AdaptiveConfig, frozen=True):
    """AdamW (Loshchilov & Hutter 2019); weight decay is applied separately from the gradient."""

    name: Literal["adamw"] = "adamw"

    def build(self, parameters: dict[str, list[nn.Parameter]], *, fused: bool = False) -> Optimizer:
        return torch.optim.AdamW(self.groups(parameters), fused=fused, **self._arguments())


class RMSpropConfig(_AdaptiveConfig, frozen=True):
    """RMSprop (Hinton 2012) with momentum, as in the Reality Check; weight decay is added to the gradient."""

    name: Literal["rmsprop"] = "rmsprop"
    momentum: float = Field(0.9, ge=0, lt=1)
    """Fraction of the previous step that is added to each step."""

    def build(self, parameters: dict[str, list[nn.Parameter]], *, fused: bool = False) -> Optimizer:
        return torch.optim.RMSprop(self.groups(parameters), momentum=self.momentum, **self._arguments())


STABILIZE = 10  # steps after which points are projected back, so that rounding errors do not accumulate


class RiemannianAdamConfig(_AdaptiveConfig, frozen=True):
    """Riemannian Adam (Bécigneul & Ganea 2019); ordinary parameters take ordinary Adam steps."""

    is_riemannian: ClassVar[bool] = True
    name: Literal["riemannian_adam"] = "riemannian_adam"

    def build(self, parameters: dict[str, list[nn.Parameter]], *, fused: bool = False) -> Optimizer:
        options = {"stabilize": STABILIZE, **self._arguments()}
        optimizer: Optimizer = load_geoopt().optim.RiemannianAdam(self.groups(parameters), **options)
        optimizer.register_load_state_dict_post_hook(_count_steps_in_integers)
        return optimizer


def _count_steps_in_integers(optimizer: Optimizer) -> None:
    """Restore geoopt's numbers of steps, which torch's Adam loads as float32: its corrections would be rounded."""
    for state in optimizer.state.values():
        state["step"] = int(state["step"])


class RiemannianSGDConfig(OptimizerConfig, frozen=True):
    """Riemannian SGD (Bonnabel 2013); ordinary parameters take ordinary SGD steps."""

    is_riemannian: ClassVar[bool] = True
    name: Literal["riemannian_sgd"] = "riemannian_sgd"
    momentum: float = Field(0.9, ge=0, lt=1)
    """Fraction of the previous step that is added to each step."""

    def build(self, parameters: dict[str, list[nn.Parameter]], *, fused: bool = False) -> Optimizer:
        options = {"lr": self.lr, "weight_decay": self.weight_decay, "momentum": self.momentum}
        optimizer = load_geoopt().optim.RiemannianSGD(self.groups(parameters), stabilize=STABILIZE, **options)
        if self.momentum:
            optimizer.register_step_pre_hook(_start_at_rest)
        return optimizer


def _start_at_rest(optimizer: Optimizer, *_: object) -> None:
    """Let momenta start at zero: geoopt's start with the Euclidean gradient, so the first step is 1.9 times as long."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter not in optimizer.state:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


import_on_demand(__name__)
