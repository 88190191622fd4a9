"""Two ranks that share every batch end at the weights of one, for every loss; also stopped or killed in between."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dmlkit.distributed.launch import OWN_STORE
from dmlkit.losses.base import LossConfig
from dmlkit.run_folder.folder import RunFolder
from tests.conftest import END, ROOT
from tests.datasets import trees
from tests.distributed.tiny_runs import RECIPE, SHARED_OUT, TUNED, train_all
from tests.processes import command_line, run_on_ranks

pytestmark = pytest.mark.heavy
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_on_ranks(1, train_all, folder / "one")
    run_on_ranks(2, train_all, folder / "two", folder / "one" / "stopped")
    run_on_ranks(1, train_all, folder / "two", folder / "two" / "stopped")
    return folder


def assert_same_weights(found: Path, expected: Path, atol: float = 1e-5):
    one, two = (RunFolder(path).load_checkpoint("last") for path in (expected, found))
    assert one["model"]["head.linear.bias"].abs().max() > 2.5e-4  # it began at 0: a gradient off by a tenth would show
    for part in ("model", "objective"):
        for name, tensor in one[part].items():
            torch.testing.assert_close(two[part][name], tensor, atol=atol, rtol=0, msg=f"{part} {name}")


PAIRS = {name: name for name in (*sorted(LossConfig.variants), *TUNED, "accumulated", "hard classes")}
PAIRS |= {"chunked": "multi_similarity"} | {f"{loss} sharded": loss for loss in SHARED_OUT}
"""What two ranks train, and what one rank trains to the same weights."""


@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks_equal_one(runs: Path, name: str):
    assert_same_weights(runs / "two" / name, runs / "one" / PAIRS[name])


def test_two_ranks_find_the_hard_classes_of_one(runs: Path):
    one, two = (RunFolder(runs / path / "hard classes").load_checkpoint("last")["sampler"] for path in ("one", "two"))
    assert torch.equal(two["neighbors"], one["neighbors"]) and torch.equal(two["counts"], one["counts"])


@pytest.mark.parametrize("begun", ["one", "two"])
def test_a_run_stopped_on_one_number_of_ranks_goes_on_with_another(runs: Path, begun: str):
    assert_same_weights(runs / begun / "stopped", runs / "one" / "unbroken")
    stopped, unbroken = (
        RunFolder(runs / path).load_checkpoint("last") for path in (f"{begun}/stopped", "one/unbroken")
    )
    assert stopped["epoch"] == unbroken["epoch"] == 3
    for name, moments in unbroken["optimizer"]["state"].items():
        found = stopped["optimizer"]["state"][name]["momentum_buffer"]
        torch.testing.assert_close(found, moments["momentum_buffer"], atol=1e-3, rtol=1e-3)


def test_a_rank_that_dies_is_started_again_and_the_run_ends_as_if_it_had_not(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(loss="mpa"))
    words = ["train", str(recipe), "--resume", "--device", "cpu", "--set", "training.epochs=4"]
    words += ["--set", "training.shard_proxies=true", "--output"]
    launcher = [*TORCHRUN, "--max-restarts=1", "-m", "tests.distributed.dying_rank"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), OWN_STORE: "1"}
    command = [*launcher, *words, str(tmp_path / "killed")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=END, env=environment, check=False)
    output = run.stdout + run.stderr
    assert run.returncode == 0 and output.count("epoch 4/4") == 1, output
    assert "exitcode: -9" in output and "Traceback" not in output, output  # torchrun says what happened
    assert "joined at its end: True" not in output and output.count("joined at its end: False") >= 2, output
    run_on_ranks(2, command_line, *words, str(tmp_path / "unbroken"))
    assert_same_weights(tmp_path / "killed", tmp_path / "unbroken", atol=0)
    epochs = [row.epoch for row in RunFolder(tmp_path / "killed").read_metrics()]
    assert epochs == [1, 2, 3, 4]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_share_what_can_be_read_of_a_batch(tmp_path: Path, accumulate: int):
    names = (f"{label}/{index}.png" for label in ("ant", "bee", "cat", "dog") for index in range(4))
    trees.photos(tmp_path / "photos", names)
    (tmp_path / "photos" / "ant" / "0.png").write_bytes(b"broken")
    recipe = tmp_path / "recipe.yaml"
    dataset = f"{{name: folder, root: {tmp_path / 'photos'}, validation_fraction: 0, on_bad_image: skip}}"
    text = RECIPE.format(loss="proxy_anchor").splitlines()
    recipe.write_text("\n".join([f"dataset: {dataset}", *text[1:]]).replace("lr: 0.00001", "lr: 0.0001"))
    steps = f"training.accumulate={accumulate}"

    def train(ranks: int, batch_size: int, output: Path):
        sampler = f"sampler={{name: random, batch_size: {batch_size}}}"
        words = ("train", str(recipe), "--device", "cpu", "--set", sampler, "--set", steps, "--output", str(output))
        assert "1 image could not be read" in run_on_ranks(ranks, command_line, *words)[0]

    train(1, 4, tmp_path / "one")
    train(2, 4, tmp_path / "two")
    assert_same_weights(tmp_path / "two", tmp_path / "one")
    train(2, 2, tmp_path / "alone")  # the rank that has the image alone
    (skipped,) = RunFolder(tmp_path / "alone").load_checkpoint("last")["skipped"]
    assert skipped.startswith(str(tmp_path / "photos" / "ant" / "0.png"))
