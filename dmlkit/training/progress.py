"""Progress of a training: the events that it reports while it runs."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from dmlkit.embedding.progress_bar import Advance
from dmlkit.run_folder.documents import EpochRow


class Pace(NamedTuple):
    """Speed of one epoch."""

    images: int
    seconds: float  # without validation
    waiting: float  # seconds of these in which training waited for a batch
    is_whole: bool  # the epoch was not interrupted


class Progress(Protocol):
    """Receiver of the events of a training."""

    def step(self, *, epoch: int, progress: float, loss: float, images: int) -> None:
        """Report the share ``progress`` of an epoch that is done, the last loss, and the images since the last call."""

    def epoch(self, row: EpochRow) -> None:
        """Report a finished epoch, whose checkpoint is on the disk, by its row of ``metrics.jsonl``."""

    def images(self, what: str, total: int) -> AbstractContextManager[Advance]:
        """Return a context around a pass over images before training; call its value with the number of images done."""
        ...


class Silent(Progress):
    """Progress that reports nothing."""

    def images(self, what: str, total: int) -> AbstractContextManager[Advance]:
        return nullcontext(lambda _: None)
