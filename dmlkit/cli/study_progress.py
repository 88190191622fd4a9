"""Progress of a study: the current run, its metrics, and the time left."""

from time import perf_counter

from rich.progress import BarColumn, Progress, TextColumn

from dmlkit.cli.console import Output, say
from dmlkit.files.escape import printable
from dmlkit.run_folder.documents import EpochRow
from dmlkit.study.status import format_duration
from dmlkit.training.progress import Silent


class RunsProgress:
    """`StudyProgress` with a bar over all its epochs in a terminal, and a line after each trained run everywhere."""

    def __init__(self) -> None:
        self.runs, self.epochs = 0, 0  # of the study, as far as known
        self.finished = 0  # runs
        self.epochs_behind = 0  # of finished runs
        self.training: dict[str, float] = {}  # runs in progress, with their finished epochs
        self.trained = 0  # epochs of this session
        self.started: float | None = None  # when this session started to train
        self.failed: dict[str, str] = {}  # the first run that failed, by its reason
        self.bar = Progress(
            TextColumn("run {task.fields[run]}/{task.fields[runs]} {task.fields[name]}", markup=False),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[left]}", markup=False),
            console=Output.console,
            disable=not Output.console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("study", total=0, run=1, runs=0, name="", loss=float("nan"), left="")

    def __enter__(self) -> "RunsProgress":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def note(self, line: str) -> None:
        say(f"note: {line}")

    def expect(self, runs: int, epochs: int) -> None:
        self.runs, self.epochs = runs, epochs
        self.bar.update(self.task, total=epochs, runs=runs)

    def start_run(self, name: str, epochs: int) -> "RunLine":
        return RunLine(self, name, epochs)

    def names(self) -> str:
        """Return the names of the runs in progress."""
        return printable(", ".join(self.training))

    def time_left(self) -> str:
        """Estimate the time left from the epochs of this session."""
        if self.started is None or not self.trained:
            return ""
        each = (perf_counter() - self.started) / self.trained
        return f"about {format_duration(each * (self.epochs - self.epochs_behind - sum(self.training.values())))} left"


class RunLine(Silent):
    """`RunProgress` of one run of a study, with the epochs of all its models."""

    def __init__(self, study: RunsProgress, name: str, epochs: int) -> None:
        self.study, self.name, self.epochs = study, name, epochs
        self.trained = 0  # epochs of this session
        self.started: float | None = None  # None while there was nothing to train

    def start_model(self) -> "RunLine":
        study, self.started = self.study, self.started or perf_counter()
        if study.started is None:
            study.started = self.started
            if study.finished:
                say(f"the first {study.finished} of {study.runs} runs are already finished")
        study.training.setdefault(self.name, 0.0)
        study.bar.update(study.task, run=study.finished + 1, name=study.names())
        return self

    def step(self, *, epoch: int, progress: float, loss: float, images: int) -> None:
        study = self.study
        study.training[self.name] = self.trained + progress
        completed = study.epochs_behind + sum(study.training.values())
        study.bar.update(study.task, completed=completed, loss=loss, left=study.time_left())

    def epoch(self, row: EpochRow) -> None:
        self.trained += 1
        self.study.trained += 1
        self.study.training[self.name] = self.trained

    def fail(self, reason: str) -> None:
        study = self.study
        study.epochs_behind += self.epochs
        study.training.pop(self.name, None)
        first = study.failed.setdefault(reason, self.name)
        say(f"{self.name} failed: {reason if first == self.name else f'as {first} did'}")

    def finish(self, figures: dict[str, float]) -> None:
        study = self.study
        study.finished += 1
        study.epochs_behind += self.epochs
        study.training.pop(self.name, None)
        if self.started is not None:
            took = format_duration(perf_counter() - self.started)
            metrics = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
            line = f"run {study.finished}/{study.runs}  {self.name}  {metrics}  {took}"
            left = study.time_left() if study.finished < study.runs else ""
            say(f"{line}, {left}" if left else line)
