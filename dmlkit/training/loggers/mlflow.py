"""MLflow: a run on the server, or in the files, that MLFLOW_TRACKING_URI names."""

import json
import os
import re
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from dmlkit.training.loggers.base import Figures, Logger

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
