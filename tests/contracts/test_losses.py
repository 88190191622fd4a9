"""What every loss promises, over every loss that there is and every manifold that it takes."""

import inspect
from typing import Any

import pytest

import dmlkit.losses
import dmlkit.manifolds
from dmlkit.component import ComponentConfig
from dmlkit.losses.base import LossConfig
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.testing.loss_cases import build
from dmlkit.testing.loss_training import TRAINING, other_manifolds_are_refused
from dmlkit.testing.loss_values import VALUES
from dmlkit.testing.promise import Promise, all_manifolds, fits, fitting_manifolds, hold, title

pytestmark = pytest.mark.filterwarnings("ignore:ProxyGML")  # k < N at a few classes
LOSSES = sorted(LossConfig.variants)


def pairs(*, fitting: bool) -> list[Any]:
    return [
        pytest.param(config, manifold, id=f"{name}-{title(manifold)}")
        for name in LOSSES
        for config in [LossConfig.variants[name]()]
        for manifold in all_manifolds()
        if fits(config, manifold) == fitting
    ]


@pytest.mark.parametrize(("config", "manifold"), pairs(fitting=True))
@pytest.mark.parametrize("promise", VALUES, ids=lambda promise: promise.__name__)
def test_values(promise: Promise, config: LossConfig, manifold: ManifoldConfig):
    hold([promise], config.name, config, manifold)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("promise", TRAINING, ids=lambda promise: promise.__name__)
def test_training(promise: Promise, name: str):
    config = LossConfig.variants[name]()
    hold([promise], name, config, fitting_manifolds(config)[0])


@pytest.mark.parametrize(("config", "manifold"), pairs(fitting=False))
def test_a_manifold_that_makes_no_sense_is_refused(config: LossConfig, manifold: ManifoldConfig):
    hold([other_manifolds_are_refused], config.name, config, manifold)


@pytest.mark.parametrize("name", LOSSES)
def test_constructor_and_config_have_the_same_defaults(name: str):
    config = LossConfig.variants[name]()
    values = {field: getattr(config, field) for field in type(config).model_fields if field != "name"}
    parts = {field for field, value in values.items() if isinstance(value, ComponentConfig)}  # built, often positional
    parts |= {"scope"}  # chooses what is built
    parameters = inspect.signature(type(build(config, fitting_manifolds(config)[0]))).parameters.values()
    options = {
        parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert {key: value for key, value in options.items() if key not in parts} == {
        key: value for key, value in values.items() if key not in parts
    }


@pytest.mark.parametrize("name", [name for name in LOSSES if LossConfig.variants[name].__module__[:7] == "dmlkit."])
def test_a_public_name(name: str):
    config = LossConfig.variants[name]()
    loss = build(config, fitting_manifolds(config)[0])
    assert getattr(dmlkit.losses, type(loss).__name__) is type(loss)
