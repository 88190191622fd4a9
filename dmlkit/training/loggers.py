"""Loggers: where the figures of a training go besides its folder."""

import json
import os
import re
import secrets
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from lightning_fabric import Fabric
from pydantic import BaseModel

from dmlkit.files.document import Document
from dmlkit.recipe.file import plain
from dmlkit.recipe.schema import LoggerName, Recipe
from dmlkit.run_folder.documents import EpochRow, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.progress import Progress

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


def check_loggers(names: Sequence[LoggerName]) -> None:
    """Make sure that loggers are installed.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"{name} is not installed; install it with: pip install 'dmlkit[{name}]'")


@contextmanager
def shown(progress: Progress, recipe: Recipe, run: RunFolder, fabric: Fabric) -> Generator[Progress]:
    """Around a training: what is told it, and what it wrote, is shown by the recipe's loggers as well."""
    if not recipe.training.loggers or not fabric.is_global_zero:
        yield progress
        return
    loggers = ShownProgress(progress, recipe, run)
    try:
        yield loggers
        loggers.show_test()
    finally:
        loggers.close()


class ShownProgress:
    """Tells what another does, and shows the rows of metrics.jsonl that loggers lack, once their checkpoint is safe."""

    def __init__(self, progress: Progress, recipe: Recipe, run: RunFolder) -> None:
        self.step, self.images = progress.step, progress.images
        self._progress, self._recipe, self._run = progress, recipe, run
        self._names = list(recipe.training.loggers)
        self._open: dict[LoggerName, Logger] = {}

    def epoch(self, row: EpochRow) -> None:
        """See `Progress`."""
        self._progress.epoch(row)
        self._catch_up()

    def show_test(self) -> None:
        """Show the figures on test classes, of a run that has come to its end."""
        self._catch_up(Summary.read(self._run.summary_path))

    def _catch_up(self, summary: Summary | None = None) -> None:
        rows = self._run.read_metrics()
        for name in tuple(self._names):
            with self._without_fault(name):
                logger, so_far = self._logger(name)
                for row in rows[so_far.epochs :]:
                    logger.log(figures_of(row), row.epoch)
                if summary and not so_far.tested:
                    figures = {f"test/{metric}": value for metric, value in summary.chosen.test.items()}
                    logger.log(figures, summary.last.epoch)
                self._note(name, ShownRun(known_as=logger.known_as, epochs=len(rows), tested=summary is not None))

    def close(self) -> None:
        """Close what is open."""
        finished = self._run.summary_path.exists()
        for name, logger in list(self._open.items()):
            with self._without_fault(name):
                logger.close(finished=finished)

    def _logger(self, name: LoggerName) -> tuple[Logger, ShownRun]:
        known = self._record().loggers.get(name)
        if name not in self._open:
            earlier = (known.known_as, known.epochs) if known else (None, 0)
            self._open[name] = LOGGERS[name](self._run.path, plain(self._recipe), *earlier)
        return self._open[name], known or ShownRun(known_as=self._open[name].known_as, epochs=0, tested=False)

    def _record(self) -> ShownRuns:
        path = self._run.loggers_path
        return ShownRuns.read(path) if path.exists() else ShownRuns(loggers={})

    def _note(self, name: LoggerName, shown_now: ShownRun) -> None:
        ShownRuns(loggers={**self._record().loggers, name: shown_now}).write(self._run.loggers_path)

    @contextmanager
    def _without_fault(self, name: LoggerName) -> Generator[None]:
        """Leave a logger out for the rest of the session once it fails; whatever it raises is no reason to stop."""
        try:
            yield
        except Exception as error:
            self._names.remove(name)
            self._open.pop(name, None)
            first = (str(error).splitlines() or [""])[0] or type(error).__name__
            told = re.sub(r"//[^/@\s]+@", "//", first)  # without a password that an address holds
            warnings.warn(
                f"training.loggers: {name} fails ({told}); the run goes on without it, and has everything", stacklevel=2
            )


def figures_of(row: EpochRow) -> Figures:
    """What loggers are shown of an epoch."""
    validation = {f"validation/{metric}": value for metric, value in (row.validation or {}).items()}
    return {"loss": row.loss, "lr": row.lr, "images_per_second": row.images_per_second, **validation}


class TensorBoardLogger(Logger):
    """Event files in ``tensorboard/`` of the run; ``tensorboard --logdir runs`` shows all runs beside each other."""

    def __init__(self, folder: Path, recipe: dict[str, Any], known_as: str | None, epochs: int) -> None:
        self.known_as = known_as or "tensorboard"
        # an epoch that a kill came after, before it was noted as shown, is shown again: the earlier one is left out
        from lightning_fabric.loggers.tensorboard import TensorBoardLogger as EventFiles

        self._files = EventFiles(folder, name=self.known_as, version="", purge_step=epochs + 1)

    def log(self, figures: Figures, epoch: int) -> None:
        self._files.log_metrics(figures, epoch)
        self._files.save()

    def close(self, *, finished: bool) -> None:
        self._files.experiment.close()


LONGEST = 500  # characters of a parameter that every version of MLflow takes
AT_ONCE = 100  # parameters


class MlflowLogger(Logger):
    """A run of the experiment that MLFLOW_EXPERIMENT_NAME names, or of ``dmlkit``, with the recipe as parameters."""

    def __init__(self, folder: Path, recipe: dict[str, Any], known_as: str | None, epochs: int) -> None:
        # its own are 7 tries of 120 s: a server that is down would keep the GPU waiting for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        self._client: Any = import_module("mlflow.tracking").MlflowClient()
        self._entities: Any = import_module("mlflow.entities")
        if known_as is not None:
            self.known_as = known_as
            self._client.update_run(known_as, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "dmlkit")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self.known_as = self._client.create_run(number, run_name=folder.name).info.run_id
        params = [self._entities.Param(key, value[:LONGEST]) for key, value in leaves(recipe)]
        for start in range(0, len(params), AT_ONCE):
            self._client.log_batch(self.known_as, params=params[start : start + AT_ONCE])

    def log(self, figures: Figures, epoch: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(allowed(name), value, now, epoch) for name, value in figures.items()]
        self._client.log_batch(self.known_as, metrics=metrics)

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self.known_as, "FINISHED" if finished else "KILLED")


def allowed(name: str) -> str:
    """The name of a figure in the characters that MLflow takes.

    Example:
        >>> allowed("validation/recall@1"), allowed("test/tar@far=0.001")
        ('validation/recall_at_1', 'test/tar_at_far_0.001')
    """
    return re.sub(r"[^\w./: -]", "_", name.replace("@", "_at_"))


def leaves(data: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a recipe, dotted, with their values as text.

    Example:
        >>> list(leaves({"seed": 0, "loss": {"name": "mpa", "k": [1, 2]}}))
        [('seed', '0'), ('loss.name', 'mpa'), ('loss.k', '[1, 2]')]
    """
    if isinstance(data, dict):
        for name, value in data.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, data if isinstance(data, str) else json.dumps(data)


class WandbLogger(Logger):
    """A run of the project ``dmlkit``, unless the environment names another; the recipe is its configuration."""

    def __init__(self, folder: Path, recipe: dict[str, Any], known_as: str | None, epochs: int) -> None:
        wandb: Any = import_module("wandb")
        is_online = os.environ.get("WANDB_MODE", "online") == "online"
        if is_online and not wandb.login(prompt=False):  # init would ask on the terminal, in the midst of a training
            raise PermissionError("no API key; wandb login, or set WANDB_API_KEY or WANDB_MODE=offline")
        self.known_as = known_as or secrets.token_hex(8)
        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, init_timeout=30)
        self._run: Any = wandb.init(
            id=self.known_as,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "dmlkit"),
            name=folder.name,
            config=recipe,
            settings=settings,
        )
        self._run.define_metric("epoch")
        self._run.define_metric("*", step_metric="epoch")

    def log(self, figures: Figures, epoch: int) -> None:
        self._run.log({"epoch": epoch, **figures})

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


LOGGERS: dict[LoggerName, type[Logger]] = {
    "tensorboard": TensorBoardLogger,
    "mlflow": MlflowLogger,
    "wandb": WandbLogger,
}
