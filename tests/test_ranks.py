"""Two ranks that share every batch end at the weights of one, for every loss."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dmlkit.losses.base import LossConfig
from dmlkit.run_folder import RunFolder

SCRIPT = Path(__file__).parent / "ranks_script.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent.parent)}
    for name, launcher in (("one", ()), ("two", TORCHRUN)):
        command = [sys.executable, *launcher, str(SCRIPT), str(folder / name)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("loss", sorted(LossConfig.variants))
def test_two_ranks_equal_one(runs: Path, loss: str):
    one, two = (RunFolder(runs / name / loss).load_checkpoint("last") for name in ("one", "two"))
    assert one["model"]["head.linear.bias"].abs().max() > 3e-4  # it began at 0: a gradient off by a tenth would show
    for part in ("model", "objective"):
        for name, tensor in one[part].items():
            torch.testing.assert_close(two[part][name], tensor, atol=1e-5, rtol=0, msg=f"{part} {name}")
