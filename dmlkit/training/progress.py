"""Progress of a training: the events that it reports, and the loggers that show them.

A logger is never allowed to stop or change a run. After each checkpoint it receives the rows of ``metrics.jsonl``, the
record of a run, that it lacks; ``loggers.json`` records how far each logger is, so a resumed run continues in the same
place.
"""

import json
import os
import re
import secrets
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

from dmlkit.distributed.launch import Ranks
from dmlkit.errors import first_line
from dmlkit.files.document import Document
from dmlkit.recipe.file import plain
from dmlkit.recipe.schema import LoggerName, Recipe
from dmlkit.run_folder.documents import EpochRow, Metrics, Summary
from dmlkit.run_folder.folder import RunFolder, named
from dmlkit.vectors.progress_bar import Advance


class Progress(Protocol):
    """Receiver of the events of a training."""

    def step(self, *, epoch: int, progress: float, loss: float, images: int) -> None:
        """Report the share ``progress`` of an epoch that is done, the last loss, and the images since the last call."""

    def epoch(self, row: EpochRow) -> None:
        """Report a finished epoch by its row of ``metrics.jsonl``."""

    def images(self, what: str, total: int) -> AbstractContextManager[Advance]:
        """Return a context around a pass without training; call its value with the number of images that are done."""
        ...


class Silent(Progress):
    """Progress that reports nothing."""

    def images(self, what: str, total: int) -> AbstractContextManager[Advance]:
        return nullcontext(lambda _: None)


def check_loggers(names: Sequence[LoggerName]) -> None:
    """Check that loggers are installed."""
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"{name} is not installed; install it with: pip install 'dmlkit[{name}]'")


class LoggedRun(BaseModel, frozen=True, extra="forbid"):
    """What one logger has received."""

    known_as: str | None  # the logger's id of the run; never a key or an address
    epochs: int  # number of epochs that were logged
    tested: bool  # whether the metrics on test classes were logged


class LoggedRuns(Document, frozen=True):
    """``loggers.json``: what each logger of a run has received, by its name."""

    kind: ClassVar[str] = "record of a run's loggers"
    loggers: dict[str, LoggedRun]


class TensorBoardLogger:
    """Writer of event files in ``tensorboard/`` of the run; ``tensorboard --logdir runs`` compares all runs."""

    def __init__(self, folder: Path, recipe: dict[str, Any], known_as: str | None, epochs: int) -> None:
        self.known_as = known_as or "tensorboard"
        from torch.utils.tensorboard import SummaryWriter

        # an epoch that was logged before a kill, but not recorded, is logged again: TensorBoard drops the earlier one
        self._files: Any = SummaryWriter(str(folder / self.known_as), purge_step=epochs + 1)

    def log(self, figures: Metrics, epoch: int) -> None:
        for name, value in figures.items():
            self._files.add_scalar(name, value, epoch)
        self._files.flush()

    def close(self, *, finished: bool) -> None:
        self._files.close()


LONGEST = 500  # characters of a parameter that every version of MLflow takes
AT_ONCE = 100  # parameters


class MlflowLogger:
    """Run of the experiment MLFLOW_EXPERIMENT_NAME, by default ``dmlkit``; the recipe becomes its parameters."""

    def __init__(self, folder: Path, recipe: dict[str, Any], known_as: str | None, epochs: int) -> None:
        # MLflow's defaults are 7 tries of 120 s: a server that is down would keep the GPU waiting for minutes
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

    def log(self, figures: Metrics, epoch: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(allowed(name), value, now, epoch) for name, value in figures.items()]
        self._client.log_batch(self.known_as, metrics=metrics)

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self.known_as, "FINISHED" if finished else "KILLED")


def allowed(name: str) -> str:
    """Return the name of a figure in the characters that MLflow accepts."""
    return re.sub(r"[^\w./: -]", "_", name.replace("@", "_at_"))


def leaves(data: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted keys of a recipe with their values as text."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, data if isinstance(data, str) else json.dumps(data)


class WandbLogger:
    """Run of the project WANDB_PROJECT, by default ``dmlkit``; the recipe becomes its configuration."""

    def __init__(self, folder: Path, recipe: dict[str, Any], known_as: str | None, epochs: int) -> None:
        wandb: Any = import_module("wandb")
        is_online = os.environ.get("WANDB_MODE", "online") == "online"
        if is_online and not wandb.login(prompt=False):  # init would prompt on the terminal in the middle of a training
            raise PermissionError("no API key; run wandb login, or set WANDB_API_KEY or WANDB_MODE=offline")
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

    def log(self, figures: Metrics, epoch: int) -> None:
        self._run.log({"epoch": epoch, **figures})

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


Logger = TensorBoardLogger | MlflowLogger | WandbLogger
CLASSES: dict[LoggerName, type[Logger]] = {
    "tensorboard": TensorBoardLogger,
    "mlflow": MlflowLogger,
    "wandb": WandbLogger,
}
"""Back ends of loggers, made of the run folder, the recipe as plain data, and what an earlier session left: the id by
which it is found again, ``known_as``, and the number of logged epochs. ``log`` takes figures such as ``loss`` and
``validation/map@r`` after an epoch, counted from 1; ``close`` sends what is left. An exception disables the logger for
the session and nothing else."""


@contextmanager
def mirror_to_loggers(progress: Progress, recipe: Recipe, run: RunFolder, ranks: Ranks) -> Generator[Progress]:
    """Mirror the metrics of a training to the recipe's loggers while the block runs."""
    if not recipe.training.loggers or not ranks.is_global_zero:
        yield progress
        return
    mirrored = MirroredProgress(progress, recipe, run)
    try:
        yield mirrored
        mirrored.log_test()
    finally:
        mirrored.close()


class MirroredProgress:
    """Progress that also sends rows of ``metrics.jsonl`` to the loggers."""

    def __init__(self, progress: Progress, recipe: Recipe, run: RunFolder) -> None:
        self.step, self.images = progress.step, progress.images
        self._progress, self._recipe, self._run = progress, recipe, run
        self._loggers: dict[LoggerName, Logger | None] = dict.fromkeys(recipe.training.loggers)  # None: not open yet

    def epoch(self, row: EpochRow) -> None:
        self._progress.epoch(row)
        self._catch_up()

    def log_test(self) -> None:
        """Log the metrics on test classes of a finished run."""
        self._catch_up(Summary.read(self._run.summary_path))

    def _catch_up(self, summary: Summary | None = None) -> None:
        rows, path = self._run.read_metrics(), self._run.loggers_path
        for name, logger in list(self._loggers.items()):
            with self._drop_on_error(name):
                logged = LoggedRuns.read(path).loggers if path.exists() else {}
                earlier = logged.get(name, LoggedRun(known_as=None, epochs=0, tested=False))
                if logger is None:
                    known = earlier.known_as, earlier.epochs
                    logger = self._loggers[name] = CLASSES[name](named(self._run.path), plain(self._recipe), *known)
                missed = rows[earlier.epochs :]
                for row in missed:
                    logger.log(figures_of(row), row.epoch)
                if summary and (missed or not earlier.tested):  # a session without it may have trained further
                    figures = {f"test/{metric}": value for metric, value in (summary.chosen.test or {}).items()}
                    logger.log(figures, summary.last.epoch)
                now = LoggedRun(known_as=logger.known_as, epochs=len(rows), tested=summary is not None)
                LoggedRuns(loggers={**logged, name: now}).write(path)

    def close(self) -> None:
        """Close the loggers that are open."""
        finished = self._run.summary_path.exists()
        for name, logger in list(self._loggers.items()):
            with self._drop_on_error(name):
                if logger is not None:
                    logger.close(finished=finished)

    @contextmanager
    def _drop_on_error(self, name: LoggerName) -> Generator[None]:
        """Warn and drop a logger for the rest of the session when it fails; the run never stops for it."""
        try:
            yield
        except (Exception, SystemExit) as error:  # a library's own sys.exit would end the training without a word
            del self._loggers[name]
            message = re.sub(r"//[^/@\s]+@", "//", first_line(error))  # without a password that an address may contain
            text = f"training.loggers: {name} fails ({message}); the run continues without it and keeps all its metrics"
            warnings.warn(text, stacklevel=2)


def figures_of(row: EpochRow) -> Metrics:
    """Return the figures of an epoch that are logged."""
    validation = {f"validation/{metric}": value for metric, value in (row.validation or {}).items()}
    terms = {f"loss/{term}": value for term, value in (row.terms or {}).items()}
    return {"loss": row.loss, **terms, "lr": row.lr, "images_per_second": row.images_per_second, **validation}
