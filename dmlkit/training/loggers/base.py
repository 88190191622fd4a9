"""The logger interface: another place where a run is shown."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

Figures = dict[str, float]


class Logger(ABC):
    """Shows one run in another place. Any exception that it raises costs the run nothing but this logger.

    Args:
        folder: of the run, by whose name it is shown.
        recipe: of the run, as plain data.
        known_as: what the logger called the run in an earlier session; None for a new one.
        epochs: how many were shown in earlier sessions.

    Attributes:
        known_as: what finds the run again in a later session.
    """

    known_as: str

    @abstractmethod
    def __init__(self, folder: Path, recipe: dict[str, Any], known_as: str | None, epochs: int) -> None: ...

    @abstractmethod
    def log(self, figures: Figures, epoch: int) -> None:
        """Show figures such as ``loss`` and ``validation/map@r`` after an epoch, counted from 1."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Send what is left, and say whether the run has ended or was stopped before."""
