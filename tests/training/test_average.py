"""The average of the weights: through an interruption, and what a run is judged by; test_gradients has its loop."""

import signal
from collections.abc import Callable
from pathlib import Path
from random import randrange, uniform

import pytest
import torch

import dmlkit as library
from dmlkit.run_folder.folder import RunFolder
from tests.conftest import END, TINY_RECIPE
from tests.processes import Forked, killed_command_line, start

DECAY = 0.8
AVERAGED = TINY_RECIPE.replace("epochs: 3", f"epochs: 3, ema: {DECAY}")


def assert_same_bits(whole: Path, cut: Path, context: str = ""):
    """Of the average, of where the last step left the weights, and of the loss."""
    first, second = (RunFolder(run).load_checkpoint("last") for run in (whole, cut))
    for part in ("model", "latest", "objective"):
        assert first[part] and first[part].keys() == second[part].keys()
        for name, tensor in first[part].items():
            assert torch.equal(tensor, second[part][name]), (name, context)
    assert any(not torch.equal(first["model"][name], weight) for name, weight in first["latest"].items())


@pytest.mark.heavy
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_average_that_is_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path, accumulate: int):
    recipe, cut = tmp_path / "averaged.yaml", tmp_path / "cut"
    recipe.write_text(AVERAGED.replace("epochs: 3", f"epochs: 12, accumulate: {accumulate}"))
    words = [*map(str, ("train", recipe, "--device", "cpu", "--resume", "-o"))]
    whole = start(*words, tmp_path / "whole")
    assert whole.wait(END) == 0, whole.communicate()[0]
    moments = [(randrange(4, 8), uniform(0, 0.05)) for _ in range(2)]  # not before the first checkpoint
    for step, seconds in moments:
        killed = Forked(killed_command_line, step, seconds, *words, str(cut))
        assert killed.wait(END) == -signal.SIGKILL, killed.communicate()[0]
    assert 0 < RunFolder(cut).load_checkpoint("last")["epoch"] < 12
    resumed = start(*words, cut)
    assert resumed.wait(END) == 0, resumed.communicate()[0]
    assert_same_bits(tmp_path / "whole", cut, f"killed {moments} after which step and how many seconds")


def test_validation_judges_the_average(trained_once: Callable[..., Path], tmp_path: Path):
    run = trained_once(tmp_path, AVERAGED)
    reported = RunFolder(run).read_metrics()[-1].validation
    measured = library.evaluate(run, split="validation", checkpoint="last", device="cpu").report.metrics
    assert {name: measured[name] for name in reported} == pytest.approx(reported, abs=1e-6)
