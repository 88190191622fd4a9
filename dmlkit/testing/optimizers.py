"""The contract of optimizers."""

from math import isclose

import torch
from torch import nn

from dmlkit.manifolds import Sphere
from dmlkit.optimizers import LearningRateMultipliers, OptimizerConfig
from dmlkit.schedules import ScheduleConfig
from dmlkit.testing.promise import Promise, changed, expect, expect_close, hold


def check_optimizer(config: OptimizerConfig) -> None:
    """Check an optimizer against its contract: each part has its own learning rate, and a quadratic is minimized.

    An optimizer that ``is_riemannian`` also keeps points on the sphere.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.optimizers import AdamWConfig
        >>> check_optimizer(AdamWConfig())
    """
    hold(OPTIMIZER, config.name, config)


def groups_carry_their_rates(config: OptimizerConfig) -> None:
    """Check that each part with parameters is a group with its name and its own learning rate."""
    multipliers = LearningRateMultipliers(head=10.0, loss=100.0)
    parts = {"backbone": [nn.Parameter(torch.ones(2))], "head": [], "loss": [nn.Parameter(torch.ones(2))]}
    groups = changed(config, lr=0.01, lr_multipliers=multipliers).build(parts).param_groups
    found = [(group["name"], group["lr"]) for group in groups]
    expect([name for name, _ in found] == ["backbone", "loss"], f"got groups {found}")
    expect(found[0][1] == 0.01 and isclose(found[1][1], 1.0, rel_tol=1e-6), f"got {found}, expected 0.01 and 1")


def a_quadratic_is_minimized(config: OptimizerConfig) -> None:
    """Check that 1000 steps with lr 0.05 reach the minimum of a quadratic in two numbers."""
    parameter = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = changed(config, lr=0.05, weight_decay=0.0).build({"backbone": [parameter]})
    for _ in range(1000):
        optimizer.zero_grad()
        (parameter - torch.tensor([1.0, 1.0])).square().sum().backward()
        optimizer.step()
    expect_close(parameter.data, torch.ones(2), "the minimum", atol=1e-2, rtol=0)


def riemannian_ones_keep_points_on_the_sphere(config: OptimizerConfig) -> None:
    """Check that points stay on the sphere, if the optimizer is Riemannian."""
    if not config.is_riemannian:
        return
    proxies = Sphere(5, proxies="points").new_proxies(7)
    optimizer = changed(config, lr=0.1).build({"loss": [proxies]})
    target = torch.randn(7, 5)
    for _ in range(50):
        optimizer.zero_grad()
        (proxies * target).sum().neg().backward()
        optimizer.step()
    expect_close(proxies.norm(dim=1), torch.ones(7), "lengths", atol=1e-5, rtol=0)


OPTIMIZER: tuple[Promise, ...] = (
    groups_carry_their_rates,
    a_quadratic_is_minimized,
    riemannian_ones_keep_points_on_the_sphere,
)


def check_schedule(config: ScheduleConfig) -> None:
    """Check a schedule against its contract: a factor from 0 to 1 that rises linearly in the warm-up up to 1.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.schedules import CosineConfig
        >>> check_schedule(CosineConfig(final=0.1))
    """
    hold(SCHEDULE, config.name, config)


def factors_are_shares(config: ScheduleConfig) -> None:
    """Check that the factor is from 0 to 1 at any time of any training."""
    for epochs in (1, 2, 7, 60, 200):
        for warmup in (0.0, 0.5, 5.0):
            for step in range(101):
                expect_share(changed(config, warmup_epochs=warmup), step / 100 * epochs, epochs)


def expect_share(config: ScheduleConfig, epoch: float, epochs: int) -> None:
    """Check that a factor is from 0 to 1."""
    factor = config.factor(epoch, epochs)
    expect(0 <= factor <= 1, f"got {factor} at epoch {epoch} of {epochs} with warmup_epochs {config.warmup_epochs}")


def warmup_is_linear_and_ends_at_one(config: ScheduleConfig) -> None:
    """Check that the factor rises linearly from 0 over the warm-up and is 1 at its end."""
    schedule = changed(config, warmup_epochs=4.0)
    rising = [schedule.factor(epoch, 100) for epoch in (0, 1, 2, 3)]
    expect(rising == [0, 0.25, 0.5, 0.75], f"got {rising} during a warm-up of 4 epochs")
    expect(isclose(schedule.factor(4, 100), 1, rel_tol=1e-6), f"got {schedule.factor(4, 100)} after the warm-up")


SCHEDULE: tuple[Promise, ...] = (factors_are_shares, warmup_is_linear_and_ends_at_one)
