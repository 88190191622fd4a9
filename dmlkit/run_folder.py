"""The folder of a run: what is in it, and how it is written so that a crash never leaves half a file."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch

from dmlkit import __version__
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write, write_json
from dmlkit.files.differences import differences
from dmlkit.recipe.file import dump_recipe, plain, read_recipe
from dmlkit.recipe.schema import Recipe

FORMAT = 1  # of checkpoints; raised when an older dmlkit could not read them

CheckpointName = Literal["last", "best"]


class RunFolder:
    """A run on disk: ``recipe.yaml classes.json environment.json metrics.jsonl checkpoints/{last,best}.pt summary.json
    curves.png``.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe_path = path / "recipe.yaml"
        self.metrics_path = path / "metrics.jsonl"
        self.summary_path = path / "summary.json"
        self.curves_path = path / "curves.png"

    def checkpoint_path(self, name: CheckpointName) -> Path:
        """Where a checkpoint lies."""
        return self.path / "checkpoints" / f"{name}.pt"

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.recipe_path.exists()

    def create(self, recipe: Recipe, *, overwrite: bool) -> None:
        """Start a new run here.

        Raises:
            UserError: the folder holds a run and ``overwrite`` is off, or it holds something else.
        """
        if self.holds_run() and not overwrite:
            raise UserError(
                f"{self.path}: this folder already holds a run; continue it with --resume, replace it with "
                "--overwrite, or choose another --output"
            )
        if self.holds_run():
            for entry in (
                "recipe.yaml",
                "classes.json",
                "environment.json",
                "metrics.jsonl",
                "summary.json",
                "curves.png",
            ):
                (self.path / entry).unlink(missing_ok=True)
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(f"{self.path}: exists and is not a dmlkit run; choose another --output")
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        write_json(self.path / "environment.json", environment())
        with atomic_write(self.recipe_path) as partial:
            partial.write_text(dump_recipe(recipe), encoding="utf-8")

    def recipe(self) -> Recipe:
        """The resolved recipe of the run.

        Raises:
            UserError: the folder holds no run, or one of a dmlkit with other recipe keys.
        """
        if not self.holds_run():
            raise UserError(f"{self.path}: no run here (recipe.yaml is missing); expected a folder that train wrote")
        return read_recipe(self.recipe_path)

    def check_same_recipe(self, recipe: Recipe) -> None:
        """Refuse to continue a run with another recipe.

        Raises:
            UserError: lists every key that differs.
        """
        changes = list(differences("", plain(self.recipe()), plain(recipe)))
        if changes:
            raise UserError(
                f"{self.path}: the recipe has changed since this run began ({'; '.join(changes)}); "
                "undo that, or start a new run in another --output"
            )

    def save_checkpoint(self, name: CheckpointName, state: dict[str, Any]) -> None:
        """Write a checkpoint of tensors and plain values, all or nothing."""
        with atomic_write(self.checkpoint_path(name)) as partial:
            torch.save({"format": FORMAT, "dmlkit": __version__, **state}, partial)

    def load_checkpoint(self, name: CheckpointName) -> dict[str, Any]:
        """Read a checkpoint onto the CPU.

        Raises:
            UserError: it is missing, damaged, or of another format.
        """
        path = self.checkpoint_path(name)
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise UserError(f"{path}: no such checkpoint; expected one that train wrote") from None
        except Exception as error:  # torch raises many kinds for damaged files
            raise UserError(
                f"{path}: cannot read this checkpoint: it is damaged, or was not written by dmlkit; copy it again or "
                "train again (--debug shows torch's words)"
            ) from error
        found = state.get("format") if isinstance(state, dict) else None
        if found != FORMAT:
            written_by = f"dmlkit {state.get('dmlkit')}" if isinstance(state, dict) else "another program"
            raise UserError(
                f"{path}: a checkpoint of format {found} ({written_by}); this is dmlkit {__version__}, which reads "
                f"format {FORMAT}: use the version that wrote it, or train again"
            )
        return state

    def read_metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one per finished epoch; a last line cut off by a crash is left out."""
        rows: list[dict[str, Any]] = []
        if self.metrics_path.exists():
            for line in self.metrics_path.read_text(encoding="utf-8").splitlines():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError:
                    break
        return rows

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add a row to metrics.jsonl."""
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def keep_metrics(self, epochs: int) -> None:
        """Drop the rows of epochs after the first ``epochs``: they are about to be trained again."""
        rows = [row for row in self.read_metrics() if row["epoch"] <= epochs]
        with atomic_write(self.metrics_path) as partial:
            partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def environment() -> dict[str, Any]:
    """What a run ran on: versions, device and command."""
    import platform
    import sys
    from importlib.metadata import version

    packages = ("torchvision", "geoopt", "lightning-fabric", "numpy", "pillow", "matplotlib")
    return {
        "dmlkit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"torch": torch.__version__} | {name: version(name) for name in packages},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "command": ["dmlkit", *sys.argv[1:]],
    }
