"""What a run remembers of its loggers, so that a resumed one goes on where they were."""

from typing import ClassVar

from pydantic import BaseModel

from dmlkit.files.document import Document


class ShownRun(BaseModel, frozen=True, extra="forbid"):
    """How far a logger is."""

    known_as: str
    """What the logger calls the run: an id, never a key or an address."""
    epochs: int
    """Epochs that it was shown."""
    tested: bool
    """Whether it was shown the figures on test classes."""


class ShownRuns(Document, frozen=True):
    """``loggers.json``: where else a run is shown, and how far."""

    kind: ClassVar[str] = "record of a run's loggers"

    loggers: dict[str, ShownRun]
    """By the name of the logger."""
