"""What training tells while it runs."""

from typing import NamedTuple, Protocol

from dmlkit.run_folder.documents import EpochRow


class Pace(NamedTuple):
    """What an epoch took."""

    images: int
    seconds: float  # without validation
    waiting: float  # seconds of these in which there was no batch
    is_whole: bool  # no stop in between


class Progress(Protocol):
    """What training tells while it runs."""

    def untouched(self, split: str, images: int) -> None:
        """Before the first epoch, where the backbone is scored as it is: how many images of a split it will embed."""

    def step(self, *, epoch: int, progress: float, loss: float, images: int) -> None:
        """After a share ``progress`` of an epoch: the last loss, and the images since the last call."""

    def epoch(self, row: EpochRow) -> None:
        """After an epoch: its row of metrics.jsonl."""


class Silent:
    """Tells nothing."""

    def untouched(self, split: str, images: int) -> None:
        """See `Progress`."""

    def step(self, *, epoch: int, progress: float, loss: float, images: int) -> None:
        """See `Progress`."""

    def epoch(self, row: EpochRow) -> None:
        """See `Progress`."""
