"""Progress of long commands: bars or a live line in a terminal, plain lines elsewhere."""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from dmlkit.cli.console import Output, bars, say, say_metrics
from dmlkit.run_folder.documents import EpochRow
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.progress_bar import Advance

if TYPE_CHECKING:
    from dmlkit.recipe.schema import Recipe

WAITING = 0.2  # share of an epoch spent waiting for images from which on it is printed


class TrainingProgress:
    """Progress of a training: in a terminal, within its context, one line that changes; else a line after every epoch.

    The line shows the epoch, images/s, the time left, the loss, and the best validation so far. Time left is estimated
    from the epochs of this session, with their validation.

    Args:
        metric: the validation metric that chooses the best checkpoint.
        best: its best epoch and value in earlier sessions, if the run is resumed.
        has_workers: whether worker processes read images; stored features of frozen layers are in memory.
    """

    def __init__(
        self, epochs: int, metric: str | None = None, best: tuple[int, float] | None = None, *, has_workers: bool = True
    ) -> None:
        console, self.epochs, self.metric, self.best = Output.console, epochs, metric, best
        self.least_waiting = WAITING if has_workers else inf
        self.current, self.done = 0, 0.0  # epoch, from 1; epochs done, with the share of the current one
        self.loss, self.speed = float("nan"), 0.0
        self.first: tuple[float, float] | None = None  # time and epochs done at the first step of this session
        self.last: float | None = None  # time of the last step
        self.left: float | None = None  # seconds
        self.has_waited = False
        self.live = Live(console=console, get_renderable=self.line, transient=True) if console.is_terminal else None

    def __enter__(self) -> "TrainingProgress":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def line(self) -> Text:
        """Return the line for a terminal, never longer than it is wide."""
        if self.first is None:
            return Text("starting")
        parts = [f"epoch {self.current}/{self.epochs}", f"{self.speed:,.0f} images/s"]
        if self.done >= self.epochs:
            parts.append("evaluating")
        elif self.left is not None:
            parts.append(f"{timedelta(seconds=round(self.left))} left")
        parts.append(f"loss {self.loss:.3f}")
        if self.best:
            parts.append(f"best {self.metric} {self.best[1]:.3f} (epoch {self.best[0]})")
        return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")

    def step(self, *, epoch: int, progress: float, loss: float, images: int) -> None:
        now = perf_counter()
        if self.last is not None:
            current = images / (now - self.last)
            self.speed = 0.9 * self.speed + 0.1 * current if self.speed else current
        self.current, self.done, self.loss, self.last = epoch + 1, epoch + progress, loss, now
        started, start = self.first = self.first or (now, self.done)
        if self.done > start:
            self.left = (now - started) / (self.done - start) * (self.epochs - self.done)

    def epoch(self, row: EpochRow) -> None:
        self.last = None  # validation is not training time
        if row.validation and self.metric in row.validation:
            value = row.validation[self.metric]
            if self.best is None or value > self.best[1]:
                self.best = row.epoch, value
        waiting = f"{row.waiting:.0%} of the time waiting for images"
        if self.live and self.live.is_started:
            if row.waiting >= self.least_waiting and not self.has_waited:
                say(f"note: epoch {row.epoch} spent {waiting}; more training.workers may help")
            self.has_waited = self.has_waited or row.waiting >= self.least_waiting
            return
        line = f"epoch {row.epoch}/{self.epochs}  loss {row.loss:.4f}  {row.images_per_second:,.0f} images/s"
        say_metrics(f"{line}  validation" if row.validation else line, row.validation or {})
        if row.waiting >= self.least_waiting:
            say(f"  ({waiting})")

    @contextmanager
    def images(self, what: str, total: int) -> Generator[Advance]:
        live = self.live if self.live and self.live.is_started else None
        if live:
            live.stop()  # one bar at a time
        started = perf_counter()
        with bars()(what, total) as advance:
            yield advance
        seconds = perf_counter() - started
        say(f"{what}: {total:,} images in {seconds:.1f} s")
        if self.first:  # comes once: no part of the time of the other epochs
            self.first = self.first[0] + seconds, self.first[1]
        if live:
            live.start()


def training_progress(recipe: "Recipe", resumed: Path | None) -> TrainingProgress:
    """Return the progress of a training; ``resumed`` is the folder of the run, if it may have earlier epochs."""
    metric = recipe.training.select_by
    rows = RunFolder(resumed).read_metrics() if resumed else []
    values = [(row.epoch, row.validation[metric]) for row in rows if row.validation and metric in row.validation]
    best = max(values, key=lambda pair: pair[1], default=None)  # the first one, as in training
    has_workers = recipe.backbone.tuning.stored() is None
    return TrainingProgress(recipe.training.trained_epochs, metric, best, has_workers=has_workers)
