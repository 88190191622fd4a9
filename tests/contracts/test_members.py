"""Every head, pooling, regularizer, optimizer, schedule and transform keeps the contract of its family."""

from math import cos, pi
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dmlkit.heads import HeadConfig
from dmlkit.loading.batches import TrainingBatches
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.optimizers import OptimizerConfig
from dmlkit.pooling import GeM, PoolingConfig
from dmlkit.recipe.schema import Recipe
from dmlkit.regularizers import RegularizerConfig
from dmlkit.schedules import ScheduleConfig
from dmlkit.testing.data import TRANSFORM
from dmlkit.testing.losses import REGULARIZER, degenerate_batches_stay_finite, value_is_a_finite_scalar
from dmlkit.testing.networks import HEAD, POOLING
from dmlkit.testing.promise import Promise, fits, fitting_manifolds, hold, title
from dmlkit.testing.steps import OPTIMIZER, SCHEDULE, expect_share
from dmlkit.transforms.base import TransformConfig


def older_run() -> str:
    """The two files that make a folder a run, with what a regularizer reads of it."""
    folder = Path(mkdtemp())
    (folder / "environment.json").touch()
    (folder / "recipe.yaml").write_text("embedding_dim: 8\nmanifold: {name: sphere}\n")
    return str(folder)


SMALL = {"hierarchy": {"num_proxies": 8, "neighbors": 4, "triplets_per_anchor": 3}}  # 512 proxies take a minute
SMALL |= {"distill": {"teacher": older_run()}, "compatible": {"run": older_run()}}
ON_ALL = (value_is_a_finite_scalar, degenerate_batches_stay_finite)


def members(root: Any) -> list[Any]:
    return [(variant(**SMALL.get(name, {})),) for name, variant in sorted(root.variants.items())]


MANIFOLDS = [manifold() for _, manifold in sorted(ManifoldConfig.variants.items())]
CONTRACTS = [
    (HEAD, [(head, manifold) for (head,) in members(HeadConfig) for manifold in MANIFOLDS if fits(head, manifold)]),
    (POOLING, [*members(PoolingConfig), (GeM.Config(learn=True),)]),
    (OPTIMIZER, members(OptimizerConfig)),
    (SCHEDULE, members(ScheduleConfig)),
    (TRANSFORM, members(TransformConfig)),
    *(
        ([promise], [(config, manifold) for manifold in fitting_manifolds(config)[: None if promise in ON_ALL else 1]])
        for promise in REGULARIZER
        for (config,) in members(RegularizerConfig)
    ),
]
CASES = [
    pytest.param(promise, member, id=f"{promise.__name__}-{'-'.join(map(title, member))}")
    for promises, of_family in CONTRACTS
    for promise in promises
    for member in of_family
]


@pytest.mark.parametrize(("promise", "member"), CASES)
def test_contract(promise: Promise, member: tuple[Any, ...]):
    hold([promise], title(member[0]), *member)


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


NAMES = sorted(ScheduleConfig.variants)


@pytest.mark.parametrize("name", NAMES)
@given(progress=st.floats(0, 1), epochs=st.integers(1, 200), warmup=st.floats(0, 5))
def test_factors_are_shares(name: str, progress: float, epochs: int, warmup: float):
    expect_share(ScheduleConfig.variants[name](warmup_epochs=warmup), progress * epochs, epochs)


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
