"""The progress of `dmlkit train`: one live line in a terminal, plain lines elsewhere."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from dmlkit.cli import progress as progress_module
from dmlkit.cli.console import Output
from dmlkit.cli.progress import TrainingProgress
from dmlkit.run_folder.documents import EpochRow

STEPS = 4  # per epoch


def row(epoch: int, value: float | None, waiting: float = 0.0) -> EpochRow:
    validation = None if value is None else {"recall@1": 0.0, "map@r": value}
    return EpochRow(
        epoch=epoch, loss=1.0, lr=0.1, images_per_second=8, waiting=waiting, seconds=1, validation=validation
    )


@pytest.mark.parametrize("resumed", [0, 30])
def test_the_line_has_epoch_speed_time_left_loss_and_the_best_so_far(monkeypatch: pytest.MonkeyPatch, resumed: int):
    """A step of 16 images takes 2 s, and validation 4 s; all other figures follow."""
    clock, screen = [100.0], io.StringIO()
    monkeypatch.setattr(progress_module, "perf_counter", lambda: clock[0])
    best = (7, 0.25) if resumed else None
    monkeypatch.setattr(Output, "console", Console(file=screen, force_terminal=True, width=80))
    progress = TrainingProgress(200, "map@r", best)
    values = {1: 0.2, 2: 0.5, 3: 0.5, 4: 0.4}  # equal values: the first epoch is the best
    with progress:
        assert progress.line().plain == "starting"
        first = clock[0] + 2
        for number in range(4 * STEPS):
            epoch, step = resumed + number // STEPS, number % STEPS + 1
            clock[0] += 2
            progress.step(epoch=epoch, progress=step / STEPS, loss=3.0 - number / 16, images=16)
            text = progress.line().plain
            assert text.startswith(f"epoch {epoch + 1}/200  ") and len(text) <= 80
            assert f"loss {3.0 - number / 16:.3f}" in text
            if number:
                assert "  8 images/s  " in text
                done = number / STEPS  # epochs since the first step
                left = (clock[0] - first) / done * (200 - resumed - (number + 1) / STEPS)
                hours, minutes, seconds = map(int, re.findall(r"(\d+):(\d\d):(\d\d) left", text)[0])
                assert 3600 * hours + 60 * minutes + seconds == pytest.approx(left, abs=0.51)
            if step == STEPS:
                clock[0] += 4
                progress.epoch(row(epoch + 1, values[number // STEPS + 1]))
        assert progress.line().plain.endswith(f"best map@r 0.500 (epoch {resumed + 2})")
    written = screen.getvalue()
    assert "validation" not in written and written.count("\n") <= 1 and written.endswith("\x1b[2K")  # it is erased


def test_a_pass_that_comes_once_does_not_count_for_the_time_left(monkeypatch: pytest.MonkeyPatch):
    """Half an epoch takes 10 s, and the pretrained network 300 s after the first."""
    clock = [0.0]
    monkeypatch.setattr(progress_module, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Output, "console", Console(file=io.StringIO()))
    progress = TrainingProgress(3)
    for half in range(1, 5):
        clock[0] += 10
        progress.step(epoch=(half - 1) // 2, progress=0.5 + 0.5 * (half % 2 == 0), loss=1.0, images=16)
        if half == 2:
            with progress.images("pretrained, test", 8):
                clock[0] += 300
    assert progress.left == pytest.approx(20)


def test_the_line_is_never_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=40)
    monkeypatch.setattr(Output, "console", console)
    progress = TrainingProgress(200, "r_precision", (150, 0.5))
    progress.step(epoch=150, progress=0.5, loss=12.3, images=16)
    (line,) = console.render_lines(progress.line())
    assert cell_len("".join(segment.text for segment in line)) == 40


def test_waiting_for_images_is_noted_once_above_the_line(monkeypatch: pytest.MonkeyPatch):
    screen = io.StringIO()
    monkeypatch.setattr(Output, "console", Console(file=screen, force_terminal=True, width=200))
    with TrainingProgress(9, "map@r") as progress:
        for epoch, waiting in enumerate((0.1, 0.5, 0.6), start=1):
            progress.epoch(row(epoch, None, waiting))
    assert screen.getvalue().count("waiting for images") == 1
    assert "note: epoch 2 spent 50% of the time waiting for images" in screen.getvalue()


def test_lines_of_epochs_keep_within_80_columns_at_any_speed(monkeypatch: pytest.MonkeyPatch):
    values = {f"recall@{k}": 0.5 for k in (1, 2, 4, 8)} | {"map@r": 0.25}
    screen = io.StringIO()
    monkeypatch.setattr(Output, "console", Console(file=screen, width=80))
    progress = TrainingProgress(200, "map@r")
    change = {"images_per_second": 123_456.0, "validation": values}
    progress.epoch(row(100, 0.5, waiting=0.3).model_copy(update=change))
    lines = screen.getvalue().splitlines()
    assert "  123,456 images/s  validation recall@1 0.500" in lines[0] and max(map(len, lines)) <= 80
    said = " ".join(line.strip() for line in lines)
    assert all(f"{name} {value:.3f}" in said for name, value in values.items())


def test_train_prints_a_line_per_epoch_only_without_a_terminal(dmlkit, tiny_recipe: Path, tmp_path: Path, monkeypatch):
    words = ("train", tiny_recipe, "--device", "cpu", "--set", "training.workers=0", "-o")
    plain = dmlkit(*words, tmp_path / "plain").out
    starts = [line.split("  ")[0] for line in plain.splitlines() if line.startswith("epoch")]
    assert starts == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert max(map(len, plain.partition("run folder")[0].splitlines())) <= 80
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    live = dmlkit(*words, tmp_path / "live").out
    assert not re.search(r"epoch \d/3  loss", live) and "epoch 3/3" in live
    rows = [json.loads(line) for line in (tmp_path / "live" / "metrics.jsonl").read_text().splitlines()]
    best = max(rows, key=lambda one: one["validation"]["map@r"])
    assert f"best map@r {best['validation']['map@r']:.3f} (epoch {best['epoch']})" in live
