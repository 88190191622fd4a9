"""Every optimizer: each part learns at its own rate, and the step is the one that the name says."""

import pytest
import torch
from torch import nn

from dmlkit.optimizers import OptimizerConfig
from dmlkit.testing.promise import Promise, hold
from dmlkit.testing.steps import OPTIMIZER


@pytest.mark.parametrize("name", sorted(OptimizerConfig.variants))
@pytest.mark.parametrize("promise", OPTIMIZER, ids=lambda promise: promise.__name__)
def test_contract(promise: Promise, name: str):
    hold([promise], name, OptimizerConfig.variants[name]())


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_and_adamw_take_the_textbook_step(decoupled: bool):
    lr, decay, eps, gradient, start = 0.1, 0.5, 1e-3, 2.0, 4.0
    parameter = nn.Parameter(torch.tensor([start]))
    config = OptimizerConfig.variants["adamw" if decoupled else "adam"](lr=lr, weight_decay=decay, eps=eps)
    optimizer = config.build({"backbone": [parameter]})
    parameter.grad = torch.tensor([gradient])
    optimizer.step()
    g = gradient if decoupled else gradient + decay * start
    shrunk = start * (1 - lr * decay) if decoupled else start
    assert parameter.item() == pytest.approx(shrunk - lr * g / (abs(g) + eps), rel=1e-5)
