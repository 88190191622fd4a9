"""What the fuzz tests share: how many examples, a ground to stand on, and what may come of a command."""

import contextlib
import hashlib
import io
import os
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.gallery.conftest import place  # noqa: F401 - a fixture

FULL = "DMLKIT_FUZZ" in os.environ  # `make fuzz`
ALLOWED = {0, 1, 2, 130}  # well, a verdict, a user's mistake, stopped
RECIPE = """\
seed: 0
dataset: {name: glyphs, classes: 12, images_per_class: 3, size: 16}
transform: {name: plain, size: 16}
backbone: {name: small_cnn, width: 4}
embedding_dim: 6
loss: {name: proxy_anchor}
sampler: {name: random, batch_size: 6}
training: {epochs: 1, workers: 0}
metrics: [{name: recall, k: [1]}, {name: map_at_r}]
"""
STUDY = """\
claim: Margins matter.
recipe: base.yaml
seeds: [0, 1]
metrics: [map@r]
variants:
  small: {loss.margin: 0.1}
  large: {loss.margin: 0.3}
expect:
- {better: large, than: small, metric: map@r}
"""
PHOTOS = RECIPE.replace(
    "{name: glyphs, classes: 12, images_per_class: 3, size: 16}", "{name: folder, root: photos, validation_fraction: 0}"
)
WEIGHTS = RECIPE.replace(
    "{name: small_cnn, width: 4}", "{name: timm, model: test_resnet, weights: weights.pth, pooling: {name: avg}}"
)


MADE = (
    ("train", "base.yaml", "-o", "run"),
    ("train", "weights.yaml", "-o", "begun"),
    ("eval", "run"),
    ("embed", "run", "--split", "test"),
    ("export", "run/embeddings/test", "--format", "faiss"),
    ("gallery", "create", "run", "photos", "-o", "gallery"),
    ("study", "study.yaml", "-o", "study"),
)
"""The commands that make what is on the ground."""


VARYING = {"seconds", "images_per_second", "waiting", "created", "created_at", "cost", "command", "modified"} | {
    "training_seconds",
    "seconds_per_epoch",
    "peak_memory_bytes",
}
"""Keys of documents that say when something was, or how long it took."""


def examples(small: int, full: int) -> settings:
    """How many examples a test draws: few in `make test`, many in `make fuzz`; any example may take its time."""
    suppressed = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=full if FULL else small, deadline=None, suppress_health_check=suppressed)


def hashes(folder: Path, *without: str) -> dict[str, str]:
    """Of every file below a folder, what it holds; ``without`` what begins with these names."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not str(path.relative_to(folder)).startswith(without or "\0")
    }


def without_times(data: Any) -> Any:
    """Plain data of a document, without what varies from run to run."""
    if isinstance(data, dict):
        return {key: without_times(value) for key, value in data.items() if key not in VARYING}
    return [without_times(item) for item in data] if isinstance(data, list) else data


class Workplace:
    """A copy of a folder that is made whole again after each use: a new copy for each takes longer than the command.

    Args:
        source: the folder; nobody writes there.
        folder: its copy, made here.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder
        shutil.copytree(source, folder)
        self.know()

    def states(self) -> dict[Path, tuple[int, ...]]:
        """Of all that lies in the copy what changes with any write: the time of the last change cannot be set back."""
        found: dict[Path, tuple[int, ...]] = {}
        for path in self.folder.rglob("*"):
            state = path.lstat()
            is_folder = stat.S_ISDIR(state.st_mode)
            found[path.relative_to(self.folder)] = (0,) if is_folder else (1, state.st_ino, state.st_ctime_ns)
        return found

    def know(self) -> None:
        """Remember the state, once the clock of files has moved on: a change within its tick, 4 ms, would not show."""
        self.known = self.states()
        clock, latest = (
            self.folder.with_name(f"{self.folder.name}.clock"),
            max(state[-1] for state in self.known.values()),
        )
        clock.touch()
        while clock.stat().st_ctime_ns <= latest:
            clock.touch()

    def whole(self) -> Path:
        """The copy, as it was."""
        found = self.states()
        for name in sorted(found, reverse=True):
            path = self.folder / name
            if found[name] != self.known.get(name):
                path.rmdir() if found[name] == (0,) else path.unlink()
        missing = [name for name in sorted(self.known) if found.get(name) != self.known[name]]
        for name in missing:
            if self.known[name] == (0,):
                (self.folder / name).mkdir()
            else:
                shutil.copy2(self.source / name, self.folder / name)
        if missing:
            self.know()
        return self.folder


@pytest.fixture(scope="session")
def command() -> Callable[..., tuple[int, str]]:
    """A command through the CLI's own entry point, in this process: exit code, and what it said.

    An empty picture is saved, without drawing: 0.2 s each, and tests of pictures are elsewhere.
    """
    from matplotlib.figure import Figure

    from dmlkit.cli.app import main

    save = Figure.savefig

    def run(*words: str) -> tuple[int, str]:
        text, code = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["dmlkit", *words])
            patch.setattr(Figure, "savefig", lambda self, *place, **options: save(Figure((1, 1)), *place, **options))
            try:
                with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                    main()
            except SystemExit as ended:
                code = ended.code
        text.flush()
        said = text.buffer.getvalue().decode()
        return (0 if code is None else int(code)), said

    return run


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory, command: Callable[..., tuple[int, str]]) -> Path:
    """A folder with a recipe, a run and what commands make of it, arrays, a table and a few images."""
    import numpy as np
    import timm
    import torch

    from tests.datasets import trees

    folder = tmp_path_factory.mktemp("ground")
    (folder / "base.yaml").write_text(RECIPE)
    (folder / "weights.yaml").write_text(WEIGHTS)
    torch.save(timm.create_model("test_resnet", num_classes=0).state_dict(), folder / "weights.pth")
    (folder / "study.yaml").write_text(STUDY)
    random = np.random.default_rng(0)
    names = [f"{label}/{index}.png" for label in ("ant", "bee", "cat", "dog") for index in range(3)]
    trees.photos(folder / "photos", names, side=(12, 12))
    rows = [f"photos/{name},{name[:3]}" for name in names]
    (folder / "table.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    np.save(folder / "x.npy", random.normal(size=(24, 6)).astype(np.float32))
    np.save(folder / "y.npy", np.arange(24) % 6)
    (folder / "photos.yaml").write_text(PHOTOS)
    for words in MADE:
        with chdir(folder):
            code, said = command(*words)
        assert code == 0, said
    return folder
