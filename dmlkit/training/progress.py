"""What training tells while it runs."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from dmlkit.embedding.progress_bar import Advance
from dmlkit.run_folder.documents import EpochRow


class Pace(NamedTuple):
    """What an epoch took."""

    images: int
    seconds: float  # without validation
    waiting: float  # seconds of these in which there was no batch
    is_whole: bool  # no stop in between


class Progress(Protocol):
    """What training tells while it runs."""

    def step(self, *, epoch: int, progress: float, loss: float, images: int) -> None:
        """After a share ``progress`` of an epoch: the last loss, and the images since the last call."""

    def epoch(self, row: EpochRow) -> None:
        """After an epoch, whose checkpoint is on the disk: its row of metrics.jsonl."""

    def images(self, what: str, total: int) -> AbstractContextManager[Advance]:
        """Around what goes over images before the first epoch; gives what is told how many more are done."""
        ...


class Silent:
    """Tells nothing."""

    def step(self, *, epoch: int, progress: float, loss: float, images: int) -> None:
        """See `Progress`."""

    def epoch(self, row: EpochRow) -> None:
        """See `Progress`."""

    def images(self, what: str, total: int) -> AbstractContextManager[Advance]:
        """See `Progress`."""
        return nullcontext(lambda _: None)
