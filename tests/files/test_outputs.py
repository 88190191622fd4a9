"""Outputs at places that a user names: a file is replaced, but never one that is read or part of data."""

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.main import get_command

from dmlkit.cli.app import app
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_file, writing
from tests.conftest import TINY_RECIPE

EMBEDDING_FORMATS = ("npz", "parquet", "faiss", "tensorboard")
MODEL_FORMATS = ("safetensors", "onnx", "torch-export")
STUDY = "claim: A claim\nrecipe: r.yaml\nseeds: [0]\noverrides: {training.epochs: 1, training.workers: 0}\n"
STUDY += "grid: {loss.margin: [0.1, 0.3]}\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two runs, one of them embedded; nothing writes into it."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "r.yaml").write_text(TINY_RECIPE)
    (folder / "study.yaml").write_text(STUDY)
    np.save(folder / "x.npy", np.eye(4, dtype=np.float32))
    np.save(folder / "y.npy", np.array([0, 0, 1, 1]))
    run = folder / "st" / "runs" / "margin=0.1" / "seed-0"
    for words in (
        ["study", folder / "study.yaml", "-o", folder / "st", "--device", "cpu"],
        ["embed", run, "--split", "test", "-o", folder / "emb", "--device", "cpu"],
    ):
        get_command(app).main([str(word) for word in words], standalone_mode=False)
    shutil.copytree(run, folder / "run")
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy to work in, and the check that nothing in it was changed."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    yield tmp_path / "here"
    assert {path: path.read_bytes() for path in before} == before


ARRAYS = ["eval", "x.npy", "--labels", "y.npy"]
PLOT = ["plot", "pca", "run", "--device", "cpu"]


def test_sources_what_dmlkit_keeps_and_folders_of_others_are_never_replaced_d6(dmlkit, here: Path):
    (here / "photos").mkdir()
    Image.new("RGB", (8, 8)).save("photos/a.png")
    before = set(here.rglob("*"))
    for *words, output in (
        ["export", "emb", "--format", "npz", "-o", "emb/manifest.json"],
        ["export", "emb", "--format", "tensorboard", "-o", "emb"],
        ["export", "emb", "--format", "lancedb", "-o", "emb"],
        ["export", "run", "--format", "safetensors", "-o", "run/checkpoints/best.pt"],
        ["eval", "run", "--device", "cpu", "--output", "run/recipe.yaml"],
        ["eval", "emb", "--output", "emb/items.parquet"],
        [*ARRAYS, "--output", "y.npy"],
        ["report", "st", "-o", "st/results.md"],
        ["report", "st", "-o", "st/study.json"],
    ):
        dmlkit(*words, output).refused(output)
    for words, what in (
        (["export", "emb", "--format", "lancedb"], "a LanceDB database"),
        (["export", "emb", "--format", "tensorboard"], "TensorBoard's projector"),
        (["study", "study.yaml"], "a study"),
    ):
        dmlkit(*words, "-o", "photos").refused(f"has a.png but not {what}")
    assert set(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "name"),
    [
        *((["export", "emb", "--format", kind, "-o"], "new/out.x") for kind in ("npz", "tensorboard")),
        (["export", "run", "--format", "safetensors", "-o"], "new/out.x"),
        (["report", "st", "-o"], "new/out.tex"),
        ([*PLOT, "-o"], "new/out.png"),
        ([*ARRAYS, "--metric", "recall@1", "--output"], "new/out.csv"),
        (["inspect", "emb", "-o"], "new/out.html"),
    ],
    ids=str,
)
def test_a_file_is_replaced_whoever_wrote_it(dmlkit, here: Path, words: list[str], name: str):
    assert dmlkit(*words, name).code == 0
    files = [path for path in Path("new").rglob("*") if path.is_file()]
    sizes = {path: path.stat().st_size for path in files}
    for path in files:
        if path.name != "projector_config.pbtxt":  # by which the folder is known
            path.write_text("class,queries,recall@1,notes\n")
    dmlkit(*words, name).ok()
    assert {path: path.stat().st_size for path in files} == sizes


def test_a_folder_that_dmlkit_wrote_is_written_again(dmlkit, here: Path):
    for _ in range(2):
        assert dmlkit("export", "emb", "--format", "lancedb", "-o", "db", "--overwrite").code == 0
    assert [path.name for path in Path("db").iterdir()] == ["embeddings.lance"]


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_computed(dmlkit, here: Path, monkeypatch: Any):
    def read_only(dir: Path) -> None:  # noqa: A002 - as tempfile names it
        raise OSError(30, "Read-only file system", str(dir / "tmp"))

    monkeypatch.setattr("dmlkit.files.outputs.TemporaryFile", read_only)
    for *words, output in (
        ["inspect", "emb", "-o", "new/out.html"],
        [*ARRAYS, "--output", "out.csv"],
        [*PLOT, "-o", "out.png"],
        ["embed", "run", "-o", "new/emb"],
        ["train", "r.yaml", "-o", "new/run"],
    ):
        dmlkit(*words, output).refused(f"{here}: cannot write into this folder: Read-only file system")
        assert not Path(output).exists()


def test_outputs_that_can_be_no_file_are_one_line_t4(dmlkit, here: Path):
    exports = [["export", *words] for words in (["emb", "--format", "npz"], ["run", "--format", "safetensors"])]
    for words in (*exports, ["report", "st"], PLOT, ARRAYS):
        for output in ("emb", "", "r.yaml/x.png"):
            dmlkit(*words, "--output" if words[0] == "eval" else "-o", output).refused()
    dmlkit("export", "emb", "--format", "tensorboard", "-o", "r.yaml/x").refused()
    dmlkit("inspect", "emb", "-o", "x.txt").refused("--output x.txt: expected a name that ends in .html")
    before = set(here.rglob("*"))
    dmlkit("export", "emb", "--format", "lancedb", "-o", "").refused("--output is empty")
    assert set(here.rglob("*")) == before


def test_a_link_to_a_source_is_the_source(tmp_path: Path):
    (tmp_path / "x.npy").write_text("x")
    (tmp_path / "link.npy").symlink_to(tmp_path / "x.npy")
    with pytest.raises(UserError, match="this command reads this file"):
        check_file(tmp_path / "link.npy", sources=[tmp_path / "none", tmp_path / "x.npy"])


@pytest.mark.parametrize("name", ["/dev/null", "/dev/stdout", "fifo", "link"])
def test_no_file_takes_the_place_of_a_device_or_a_fifo(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(UserError, match="this is no regular file"):
        check_file(tmp_path / name)


def test_a_write_that_fails_is_told_with_its_file_t4(tmp_path: Path):
    for error in (OSError(28, "No space left on device"), ValueError("I/O error\nmore")):
        with pytest.raises(UserError) as fault, writing(tmp_path / "x", ValueError):
            raise error
        reason = "No space left on device" if isinstance(error, OSError) else "I/O error"
        assert str(fault.value) == f"{tmp_path / 'x'}: cannot write this file: {reason}"


@contextmanager
def no_space() -> Iterator[None]:
    """No file may grow beyond 800 bytes."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (800, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(
    "words",
    [
        *(["export", "emb", "--format", kind, "-o", "out/x"] for kind in EMBEDDING_FORMATS),
        *(["export", "run", "--format", kind, "-o", "out/x"] for kind in MODEL_FORMATS),
        ["report", "st", "-o", "out/x.md"],
        [*PLOT, "-o", "out/x.png"],
    ],
    ids=" ".join,
)
def test_no_space_is_one_line_and_leaves_nothing_t4_d11(dmlkit, pictures_are_drawn: None, here: Path, words: list[str]):
    assert dmlkit(*[word.replace("out/", "other/") for word in words]).code == 0  # all is imported and cached
    with no_space():
        result = dmlkit(*words)
    assert result.code == 2, result.err
    lines = [line for line in result.err.splitlines() if not line.startswith("warning: ")]  # of torch's exporter
    assert len(lines) == 1 and lines[0].startswith("error: out/x"), result.err
    assert not [path for path in Path("out").rglob("*") if path.is_file()]
