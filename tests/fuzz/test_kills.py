"""Every writer, ended between any two changes of the disk: the same command goes on to the same files."""

import json
import re
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.conftest import FULL, hashes, without_times
from tests.processes import KILLED, Forked, command_line, end_before_change

WRITERS: dict[str, tuple[str, ...]] = {
    "train": ("train", "base.yaml", "-o", "new", "--resume"),
    "train over a run": ("train", "base.yaml", "-o", "run", "--overwrite", "--set", "seed=1"),
    "train from weights": ("train", "weights.yaml", "-o", "new", "--resume"),
    "train from weights over a run": ("train", "weights.yaml", "-o", "begun", "--overwrite", "--set", "seed=1"),
    "embed": ("embed", "run", "photos", "-o", "new"),
    "eval": ("eval", "run", "--set", "transform.size=20"),
    "study": ("study", "study.yaml", "-o", "new"),
    "report": ("report", "study", "-o", "new.md"),
    "plot": ("plot", "pca", "run", "-o", "new.png"),
    **{
        f"export {kind}": ("export", "run/embeddings/test", "--format", kind, "-o", f"new{end}")
        for kind, end in (("faiss", ".faiss"), ("npz", ".npz"), ("parquet", ".parquet"), ("tensorboard", ""))
    },
    "export safetensors": ("export", "run", "--format", "safetensors", "-o", "new.safetensors"),
}


@pytest.mark.heavy
@pytest.mark.usefixtures("pictures_are_drawn")
@pytest.mark.parametrize("name", WRITERS)
def test_a_kill_anywhere_costs_no_file(name, ground, command, tmp_path):
    words = WRITERS[name]
    whole = shutil.copytree(ground, tmp_path / "whole")
    with chdir(whole):
        assert command(*words)[0] == 0
    expected = contents(whole)
    steps = in_child(words, shutil.copytree(ground, tmp_path / "counted"), None)
    assert steps > 0
    for step in range(1, steps + 1, 1 if FULL else max(1, steps // 2)):
        folder = shutil.copytree(ground, tmp_path / f"killed-{step}")
        assert in_child(words, folder, step) == -1
        with chdir(folder):
            code, said = command(*words)
        assert code == 0, (step, said)
        after = contents(folder)
        assert after == expected, (step, {key for key in after | expected if after.get(key) != expected.get(key)})
        shutil.rmtree(folder)


def in_child(words: tuple[str, ...], folder: Path, last: int | None) -> int:
    """Run a command in a process that ends before its ``last``-th change of the disk, as by kill -9.

    It is forked from one that has trained nothing: after a compiled training torch refuses gradients in forks.

    Returns:
        How many changes it made; -1 where it was ended.
    """
    count = folder.with_name(f"{folder.name}.count")
    process = Forked(_counted_command_line, last, str(count), str(folder), *words)
    said = process.communicate()[0]
    if process.returncode == KILLED:
        return -1
    assert process.returncode == 0, said
    return int(count.read_text())


def _counted_command_line(last: int | None, count: str, folder: str, *words: str) -> None:
    made = end_before_change(last)
    try:
        with chdir(folder):
            command_line(*words)
    finally:
        Path(count).write_text(str(made[0]))


def contents(folder: Path) -> dict[str, Any]:
    """What files hold, without times. A lock that nobody holds may stay."""
    found: dict[str, Any] = {name: value for name, value in hashes(folder).items() if not name.endswith("/.lock")}
    for name in [*found]:
        path = folder / name
        if path.parent.parent.name == "vectors" and path.suffix == ".safetensors":  # named by the places of the images
            del found[name]
            found[f"{path.parent}/{path.stat().st_size} bytes".removeprefix(str(folder))] = True
            continue
        if path.suffix in (".json", ".jsonl"):
            found[name] = [without_times(json.loads(line)) for line in _documents(path, folder)]
        elif path.suffix == ".md":
            found[name] = re.sub(r"models, [^,;]+? (of training|on)\b", "", path.read_text())  # how long it took
        elif path.suffix in (".pt", ".png", ".npz", ".safetensors"):  # times and random order inside
            found[name] = path.stat().st_size > 0
    return found


def _documents(path: Path, folder: Path) -> list[str]:
    text = path.read_text().replace(str(folder.resolve()), "")  # embeddings name their run by its absolute path too
    return text.splitlines() if path.suffix == ".jsonl" else [text]
