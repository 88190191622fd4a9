"""Progress of long commands: bars in a terminal, plain lines elsewhere."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dmlkit.cli.console import say
from dmlkit.embedding.progress_bar import Advance, Bar, image_progress
from dmlkit.run_folder.documents import EpochRow

WAITING = 0.2  # share of an epoch spent waiting for images from which on it is printed


def bars(console: Console) -> Bar:
    """Return a function that shows a progress bar for each step of a command."""
    return partial(image_progress, console)


class TrainingProgress:
    """Progress of a training: a bar with loss, images/s, time left and the last metrics, and a line after every epoch.

    Args:
        console: where to print.
        epochs: number of epochs of the run.
    """

    def __init__(self, console: Console, epochs: int) -> None:
        self.console, self.epochs = console, epochs
        self.last: float | None = None
        self.bar = Progress(
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}", markup=False),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.3f}", markup=False),
            TextColumn("{task.fields[speed]:,.0f} images/s", markup=False),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}", markup=False),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task(
            "train", total=epochs, epoch=0, epochs=epochs, loss=float("nan"), speed=0.0, metrics=""
        )

    def __enter__(self) -> "TrainingProgress":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.stop()

    def step(self, *, epoch: int, progress: float, loss: float, images: int) -> None:
        """See `dmlkit.training.progress.Progress`."""
        now = perf_counter()
        speed: float = self.bar.tasks[0].fields["speed"]
        if self.last is not None:
            current = images / (now - self.last)
            speed = 0.9 * speed + 0.1 * current if speed else current
        self.last = now
        self.bar.update(self.task, completed=epoch + progress, epoch=epoch + 1, loss=loss, speed=speed)

    def epoch(self, row: EpochRow) -> None:
        """See `dmlkit.training.progress.Progress`."""
        metrics = format_metrics(row.validation) if row.validation else ""
        line = f"epoch {row.epoch}/{self.epochs}  loss {row.loss:.4f}  {row.images_per_second:,.0f} images/s"
        if row.waiting >= WAITING:
            line += f" ({row.waiting:.0%} of the time waiting for images)"
        say(self.console, f"{line}  validation {metrics}" if metrics else line)
        self.bar.update(self.task, completed=row.epoch, metrics=metrics)
        self.last = None  # validation is not training time

    @contextmanager
    def images(self, what: str, total: int) -> Generator[Advance]:
        """See `dmlkit.training.progress.Progress`."""
        self.bar.stop()  # one bar at a time
        started = perf_counter()
        with image_progress(self.console, what, total) as advance:
            yield advance
        say(self.console, f"{what}: {total:,} images in {perf_counter() - started:.1f} s")
        self.bar.start()


def format_metrics(metrics: dict[str, float]) -> str:
    """Return metrics on one line.

    Example:
        >>> format_metrics({"recall@1": 0.93214, "map@r": 0.5})
        'recall@1 0.932  map@r 0.500'
    """
    return "  ".join(f"{name} {value:.3f}" for name, value in metrics.items())
