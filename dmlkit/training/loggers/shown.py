"""Training that is shown by loggers too, from what stands in the run's folder: they may fail, and catch up later."""

import re
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

from lightning_fabric import Fabric

from dmlkit.recipe.file import plain
from dmlkit.recipe.schema import Recipe
from dmlkit.recipe.training import LoggerName
from dmlkit.run_folder.documents import EpochRow, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.loggers.base import Figures, Logger
from dmlkit.training.loggers.record import ShownRun, ShownRuns
from dmlkit.training.progress import Progress

CLASSES: dict[LoggerName, str] = {"tensorboard": "TensorBoardLogger", "mlflow": "MlflowLogger", "wandb": "WandbLogger"}


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
            module = import_module(f"dmlkit.training.loggers.{name}")
            earlier = (known.known_as, known.epochs) if known else (None, 0)
            self._open[name] = getattr(module, CLASSES[name])(self._run.path, plain(self._recipe), *earlier)
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
        except (Exception, SystemExit) as error:  # a library's own sys.exit would end the training without a word
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
