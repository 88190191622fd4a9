"""Proxies shared out over ranks: value and gradient of one rank that holds them all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dmlkit.losses.base import LossConfig

SCRIPT = Path(__file__).parent / "class_shard_script.py"
SHARDED = sorted(name for name, variant in LossConfig.variants.items() if variant.shares_classes)


@pytest.fixture(scope="module")
def distances() -> dict[int, dict[str, float]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent.parent)}
    found: dict[int, dict[str, float]] = {}
    for ranks in (2, 3):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *launcher, str(SCRIPT)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert run.returncode == 0, run.stdout + run.stderr
        found[ranks] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fraction", ["1", "0.6"])
@pytest.mark.parametrize("loss", SHARDED)
def test_sharded_equals_whole_in_value_and_gradient(distances: dict[int, dict[str, float]], loss: str, fraction: str):
    for ranks in (2, 3):
        assert distances[ranks][f"{loss} {fraction}"] < 1e-10


def test_the_losses_that_share_their_proxies_out():
    assert [
        *("arcface", "cosface", "mpa", "norm_softmax"),
        *("proxy_anchor", "proxy_isa", "proxy_nca", "soft_triple"),
    ] == SHARDED
