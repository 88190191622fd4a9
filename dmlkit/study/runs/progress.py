"""What a study tells while it runs."""

from typing import Protocol

from dmlkit.training.progress import Progress


class RunProgress(Progress, Protocol):
    """What is told of one run, beside what a training tells."""

    def start_model(self) -> None:
        """Before a model of the run is trained or continued."""

    def finish(self, figures: dict[str, float]) -> None:
        """After it, with the figures that the study reports."""

    def fail(self, reason: str) -> None:
        """After one that cannot be trained."""


class StudyProgress(Protocol):
    """What a study tells while it runs."""

    def note(self, line: str) -> None:
        """Before the first run: what is known of the study that a reader should know."""

    def expect(self, runs: int, epochs: int) -> None:
        """Before the first run, and whenever more are known: how many there are in all."""

    def start_run(self, name: str, epochs: int) -> RunProgress:
        """Before a run of so many epochs, also before one that is complete."""
        ...
