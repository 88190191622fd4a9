"""Every schedule: a pure factor in [0, 1] that starts at 1 after its warm-up; and the curves that they promise."""

from math import cos, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmlkit.schedules import ScheduleConfig
from dmlkit.testing.promise import Promise, hold
from dmlkit.testing.steps import SCHEDULE, expect_share

NAMES = sorted(ScheduleConfig.variants)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("promise", SCHEDULE, ids=lambda promise: promise.__name__)
def test_contract(promise: Promise, name: str):
    hold([promise], name, ScheduleConfig.variants[name]())


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
