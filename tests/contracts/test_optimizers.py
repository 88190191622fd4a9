"""Every optimizer: each part learns at its own rate, and the step is the one that the name says."""

import pytest
import torch
from torch import nn

from dmlkit.manifolds import Sphere
from dmlkit.optimizers.base import LearningRateMultipliers, OptimizerConfig


@pytest.fixture(params=sorted(OptimizerConfig.variants))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_groups_carry_their_rates(name: str):
    multipliers = LearningRateMultipliers(head=10.0, loss=100.0)
    config = OptimizerConfig.variants[name](lr=0.01, lr_multipliers=multipliers)
    parts = {"backbone": [nn.Parameter(torch.ones(2))], "head": [], "loss": [nn.Parameter(torch.ones(2))]}
    groups = config.build(parts).param_groups
    assert [(group["name"], group["lr"]) for group in groups] == [("backbone", 0.01), ("loss", pytest.approx(1.0))]


def test_a_quadratic_is_minimized(name: str):
    parameter = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = OptimizerConfig.variants[name](lr=0.05, weight_decay=0.0).build({"backbone": [parameter]})
    for _ in range(1000):
        optimizer.zero_grad()
        (parameter - torch.tensor([1.0, 1.0])).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(parameter.data, torch.ones(2), atol=1e-2, rtol=0)


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


def test_riemannian_optimizers_keep_points_on_the_sphere():
    for name in (name for name in OptimizerConfig.variants if name.startswith("riemannian")):
        proxies = Sphere(5, proxies="points").new_proxies(7)
        optimizer = OptimizerConfig.variants[name](lr=0.1).build({"loss": [proxies]})
        target = torch.randn(7, 5)
        for _ in range(50):
            optimizer.zero_grad()
            (proxies * target).sum().neg().backward()
            optimizer.step()
        torch.testing.assert_close(proxies.norm(dim=1), torch.ones(7), atol=1e-5, rtol=0)
