import sys
from ctypes import CDLL

import pytest
import torch

from dmlkit.training.summary import forget_peak_memory, peak_memory
from tests.processes import Forked

CPU = torch.device("cpu")
MEGABYTE = 2**20


def _hold(megabytes: int) -> int:
    """Return the peak with so many more megabytes, which are given back."""
    torch.ones(megabytes * MEGABYTE, dtype=torch.uint8)
    CDLL(None).malloc_trim(0)
    found = peak_memory(CPU)
    assert found is not None
    return found


def _peaks() -> None:
    forget_peak_memory(CPU)
    before = _hold(1)
    large = _hold(600)
    assert 550 * MEGABYTE < large - before < 650 * MEGABYTE
    assert _hold(1) >= large - MEGABYTE  # a peak stays
    forget_peak_memory(CPU)
    assert _hold(100) < before + 200 * MEGABYTE


@pytest.mark.skipif(sys.platform != "linux", reason="a peak can be forgotten on Linux alone")
def test_a_peak_is_of_what_came_since():
    process = Forked(_peaks)  # this process gives memory of earlier tests back at any time, 200 MB once
    assert process.wait(60) == 0, process.printed()
