import sys

import pytest
import torch

from dmlkit.training.summary import forget_peak_memory, peak_memory

CPU = torch.device("cpu")
MEGABYTE = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="a peak can be forgotten on Linux alone")
def test_a_peak_is_of_what_came_since():
    from ctypes import CDLL

    def hold(megabytes: int) -> int:
        """The peak with so many more megabytes, which are given back."""
        torch.ones(megabytes * MEGABYTE, dtype=torch.uint8)
        CDLL(None).malloc_trim(0)
        found = peak_memory(CPU)
        assert found is not None
        return found

    forget_peak_memory(CPU)
    before = hold(1)
    large = hold(600)
    assert 550 * MEGABYTE < large - before < 650 * MEGABYTE
    assert hold(1) >= large - MEGABYTE  # a peak stays
    forget_peak_memory(CPU)
    assert hold(100) < before + 200 * MEGABYTE
