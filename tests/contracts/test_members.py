"""Every head, pooling, regularizer, optimizer, schedule and transform keeps the contract of its family."""

from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmlkit.heads import HeadConfig
from dmlkit.loading.batches import TrainingBatches
from dmlkit.manifolds import Poincare
from dmlkit.optimizers import OptimizerConfig
from dmlkit.pooling import GeM, PoolingConfig
from dmlkit.recipe.schema import Recipe
from dmlkit.regularizers import RegularizerConfig
from dmlkit.schedules import ScheduleConfig
from dmlkit.testing import check_head, check_optimizer, check_pooling, check_schedule, check_transform
from dmlkit.testing.losses import REGULARIZER, degenerate_batches_stay_finite, value_is_a_finite_scalar
from dmlkit.testing.promise import fitting_manifolds, hold
from dmlkit.transforms.base import TransformConfig

FAMILIES: dict[Callable[[Any], None], Any] = {
    check_head: HeadConfig,
    check_pooling: PoolingConfig,
    check_optimizer: OptimizerConfig,
    check_schedule: ScheduleConfig,
    check_transform: TransformConfig,
}
MEMBERS = [(check, variant()) for check, root in FAMILIES.items() for _, variant in sorted(root.variants.items())]
MEMBERS.append((check_pooling, GeM.Config(learn=True)))


@pytest.mark.parametrize(
    ("check", "config"), [pytest.param(*case, id=f"{case[1].name}-{case[0].__name__}") for case in MEMBERS]
)
def test_contract(check: Callable[[Any], None], config: Any):
    check(config)


@pytest.mark.parametrize("name", sorted(RegularizerConfig.variants))
def test_contract_of_a_regularizer(name: str, tmp_path: Path):
    """The folder has the two files that make it a run, with what a regularizer reads of it."""
    (tmp_path / "environment.json").touch()
    (tmp_path / "recipe.yaml").write_text("embedding_dim: 8\nmanifold: {name: sphere}\n")
    options: dict[str, Any] = {
        "hierarchy": {"num_proxies": 8, "neighbors": 4, "triplets_per_anchor": 3},  # 512 proxies take a minute
        "distill": {"teacher": str(tmp_path)},
        "compatible": {"run": str(tmp_path)},
    }
    config = RegularizerConfig.variants[name](**options.get(name, {}))
    first, *others = fitting_manifolds(config)
    hold(REGULARIZER, name, config, first)
    for manifold in others:
        hold((value_is_a_finite_scalar, degenerate_batches_stay_finite), name, config, manifold)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop"])
def test_adaptive_optimizers_take_the_textbook_steps(name: str):
    """Of a constant gradient: the means of Adam are it from the first step on, that of RMSprop starts at 0."""
    lr, decay, eps, gradient, start = 0.1, 0.5, 1e-3, 2.0, 4.0
    parameter = nn.Parameter(torch.tensor([start]))
    optimizer = OptimizerConfig.variants[name](lr=lr, weight_decay=decay, eps=eps).build({"backbone": [parameter]})
    value, mean, step = start, 0.0, 0.0
    for _ in range(2):
        parameter.grad = torch.tensor([gradient])
        optimizer.step()
        g = gradient if name == "adamw" else gradient + decay * value
        if name == "rmsprop":
            mean = 0.99 * mean + 0.01 * g**2
            step = 0.9 * step + g / (mean**0.5 + eps)
        elif name == "adamw":
            value, step = value * (1 - lr * decay), g / (abs(g) + eps)
        else:
            step = g / (abs(g) + eps)
        value -= lr * step
        assert parameter.item() == pytest.approx(value, rel=1e-5)
        if name == "adam":
            break  # the decayed gradient of its second step is another one


def test_momentum_of_riemannian_sgd_starts_at_zero():
    """A weight follows v = 0.9 v + g, and on the ball, at 1/2, the gradient is divided by (2 / (1 - x^2))^2 = 64/9."""
    lr, decay, gradient, start = 0.1, 0.5, 2.0, 0.5
    weight = nn.Parameter(torch.tensor([start]))
    point = Poincare(1, proxies="points").new_proxies(1)
    point.data.fill_(start)
    optimizer = OptimizerConfig.variants["riemannian_sgd"](lr=lr, weight_decay=decay).build({"loss": [weight, point]})
    value, velocity = start, 0.0
    for step in range(3):
        weight.grad, point.grad = torch.tensor([gradient]), torch.tensor([[gradient]])
        optimizer.step()
        velocity = 0.9 * velocity + gradient + decay * value
        value -= lr * velocity
        assert weight.item() == pytest.approx(value, rel=1e-5)
        if step == 0:
            assert point.item() == pytest.approx(start - lr * (gradient + decay * start) * 9 / 64, rel=1e-5)


def test_curves():
    step = ScheduleConfig.variants["step"](every=10, gamma=0.1)
    assert [step.factor(epoch, 30) for epoch in (0, 9.9, 10, 25)] == pytest.approx([1, 1, 0.1, 0.01])
    cosine = ScheduleConfig.variants["cosine"](warmup_epochs=2.0, final=0.2)
    assert cosine.factor(12, 12) == pytest.approx(0.2)
    assert cosine.factor(5, 12) == pytest.approx(0.2 + 0.8 * (1 + cos(pi * 0.3)) / 2)
    assert ScheduleConfig.variants["constant"]().factor(7.5, 10) == 1


def test_ranks_split_the_batches_of_one_process():
    recipe = Recipe.model_validate_json('{"dataset": {"name": "glyphs"}, "loss": {"name": "triplet"}}')
    sampler = recipe.sampler.build(torch.arange(640), 0)
    whole = TrainingBatches(sampler, seed=3)
    parts = [TrainingBatches(sampler, seed=3, rank=rank, ranks=4) for rank in range(4)]
    for batches in (whole, *parts):
        batches.epoch = 2
    joined = [[draw for piece in pieces for draw in piece] for pieces in zip(*parts, strict=True)]
    assert joined == list(whole)
    whole.start = 5
    assert list(whole) == joined[5:] and len(whole) == len(joined) - 5


def test_a_member_without_a_docstring_is_refused():
    class Silent:
        pass

    with pytest.raises(AssertionError, match=r"mine: a_line_of_help_says_what_it_is: .*: Silent has no docstring"):
        hold([], "mine", Silent())
