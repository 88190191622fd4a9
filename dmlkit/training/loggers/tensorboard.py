"""TensorBoard: event files in the run's own folder."""

from pathlib import Path
from typing import Any

from lightning_fabric.loggers.tensorboard import TensorBoardLogger as EventFiles

from dmlkit.training.loggers.base import Figures, Logger


class TensorBoardLogger(Logger):
    """Event files in ``tensorboard/`` of the run; ``tensorboard --logdir runs`` shows all runs beside each other."""

    def __init__(self, folder: Path, recipe: dict[str, Any], known_as: str | None, epochs: int) -> None:
        self.known_as = known_as or "tensorboard"
        # an epoch that a kill came after, before it was noted as shown, is shown again: the earlier one is left out
        self._files = EventFiles(folder, name=self.known_as, version="", purge_step=epochs + 1)

    def log(self, figures: Figures, epoch: int) -> None:
        self._files.log_metrics(figures, epoch)
        self._files.save()

    def close(self, *, finished: bool) -> None:
        self._files.experiment.close()
