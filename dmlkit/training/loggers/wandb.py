"""Weights & Biases: a run of the project that WANDB_PROJECT names; WANDB_MODE=offline keeps it on this machine."""

import os
import secrets
from importlib import import_module
from pathlib import Path
from typing import Any

from dmlkit.training.loggers.base import Figures, Logger


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
