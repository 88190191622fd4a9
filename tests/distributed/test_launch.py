"""What claiming a device does to the process."""

import subprocess
import sys

import pytest

from dmlkit.distributed.launch import start_fabric
from dmlkit.errors import UserError

FAULTS = """
import resource, sys
import torch
from dmlkit.distributed.launch import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16, 2**20)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(30)))  # small blocks may split the first few that are kept
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_memory_that_was_freed_is_used_again_without_page_faults():
    given_back, kept = (
        int(subprocess.run([sys.executable, "-c", FAULTS, word], check=True, capture_output=True, text=True).stdout)
        for word in ("given back", "kept")
    )
    assert kept < 10 and kept < given_back


def test_half_precision_of_16_bits_needs_a_gpu():
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        start_fabric("cpu", "fp16")
