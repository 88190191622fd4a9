"""How long training waits for images, and when that is told."""

import io
from typing import Any

import pytest
from rich.console import Console

from dmlkit.cli.progress import TrainingProgress
from dmlkit.loading.batches import TimedBatches
from dmlkit.run_folder.documents import EpochRow


def test_time_in_the_loader_is_told_from_time_in_the_step(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr("dmlkit.loading.batches.perf_counter", lambda: clock[0])

    def loader() -> Any:
        for wait in (3.0, 0.5, 0.25):
            clock[0] += wait
            yield wait

    batches = TimedBatches(loader())
    for number, _ in enumerate(batches):
        clock[0] += 10 + number
    assert batches.seconds == 3.75


@pytest.mark.parametrize(("waiting", "told"), [(0.0, False), (0.19, False), (0.2, True), (0.434, True)])
def test_a_slow_loader_is_told(waiting: float, told: bool):
    screen = io.StringIO()
    progress = TrainingProgress(Console(file=screen, width=200), epochs=2)
    row = EpochRow(epoch=1, loss=1.0, lr=0.1, images_per_second=10, waiting=waiting, seconds=1, validation=None)
    progress.epoch(row)
    assert ("of the time waiting for images" in screen.getvalue()) == told
    assert (f"({waiting:.0%} " in screen.getvalue()) == told
