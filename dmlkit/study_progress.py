"""What a person sees while a study runs: which run of how many, its figures, and the time that is left."""

from time import perf_counter
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dmlkit.progress import format_metrics


class RunsProgress:
    """A bar over all epochs of a study in a terminal, and everywhere a line after each run that was trained.

    Args:
        console: where to.
        runs: of the study.
        epochs: of all of them.
    """

    def __init__(self, console: Console, runs: int, epochs: int) -> None:
        self.console, self.runs = console, runs
        self.epochs, self.epochs_behind, self.epochs_of_run = epochs, 0, 0  # of complete runs, and of this one
        self.finished = 0  # runs
        self.name = ""
        self.trained = self.trained_in_run = 0  # epochs of this session
        self.started: float | None = None  # when this session began to train
        self.run_started: float | None = None  # the same of this run; None while there was nothing to train
        self.bar = Progress(
            TextColumn("run {task.fields[run]}/{task.fields[runs]} {task.fields[name]}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("study", total=epochs, run=1, runs=runs, name="", loss=float("nan"), left="")

    def __enter__(self) -> "RunsProgress":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.bar.stop()

    def start_run(self, name: str, epochs: int) -> None:
        """See `dmlkit.study.StudyProgress`."""
        self.name, self.epochs_of_run, self.trained_in_run, self.run_started = name, epochs, 0, None

    def start_model(self) -> None:
        """See `dmlkit.study.StudyProgress`."""
        now = perf_counter()
        if self.started is None and self.finished:
            self.console.print(f"{self.finished} of {self.runs} runs are complete already", highlight=False)
        self.started = self.started or now
        self.run_started = self.run_started or now
        self.bar.update(self.task, run=self.finished + 1, name=self.name)

    def step(self, *, epoch: int, progress: float, loss: float, images: int) -> None:
        """See `dmlkit.train.Progress`."""
        completed = self.epochs_behind + self.trained_in_run + progress
        self.bar.update(self.task, completed=completed, loss=loss, left=self.time_left())

    def epoch(self, row: dict[str, Any]) -> None:
        """See `dmlkit.train.Progress`."""
        self.trained += 1
        self.trained_in_run += 1

    def finish_run(self, figures: dict[str, float]) -> None:
        """See `dmlkit.study.StudyProgress`."""
        self.finished += 1
        self.epochs_behind += self.epochs_of_run
        trained_here = self.run_started
        self.trained_in_run = 0
        if trained_here is not None:
            took = spoken_time(perf_counter() - trained_here)
            line = f"run {self.finished}/{self.runs}  {self.name}  {format_metrics(figures)}  {took}"
            left = self.time_left() if self.finished < self.runs else ""
            self.console.print(f"{line}, {left}" if left else line, highlight=False, soft_wrap=True)

    def time_left(self) -> str:
        """From the time that this session's epochs took."""
        if self.started is None or not self.trained:
            return ""
        each = (perf_counter() - self.started) / self.trained
        return f"about {spoken_time(each * (self.epochs - self.epochs_behind - self.trained_in_run))} left"


def spoken_time(seconds: float) -> str:
    """A duration as people say it.

    Example:
        >>> spoken_time(41.2), spoken_time(750), spoken_time(12000)
        ('41 s', '12 min 30 s', '3 h 20 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
