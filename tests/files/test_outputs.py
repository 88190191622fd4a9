"""Outputs at places that a user names: somebody else's file and the command's own sources survive every command."""

import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.main import get_command

from dmlkit.cli.app import app
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_output, is_our_picture, picture_metadata, writing
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


ARRAYS = ["eval", "--embeddings", "x.npy", "--labels", "y.npy"]
PLOT = ["plot", "pca", "run", "--device", "cpu"]


@pytest.mark.parametrize(
    "words",
    [
        *(["export", "emb", "--format", kind, "-o", f"emb/{name}"]
          for kind in EMBEDDING_FORMATS for name in ("embeddings.npy", "items.parquet", "manifest.json")),
        *(["export", "run", "--format", kind, "-o", f"run/{name}"]
          for kind in MODEL_FORMATS for name in ("checkpoints/best.pt", "checkpoints/last.pt", "summary.json")),
        ["eval", "run", "--device", "cpu", "--per-class", "r.yaml"],
        ["eval", "emb", "--per-class", "emb/items.parquet"],
        [*ARRAYS, "--per-class", "y.npy"],
        ["report", "st", "-o", "st/results.md"],
        ["report", "st", "-o", "st/study.json"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_sources_and_what_dmlkit_keeps_are_never_replaced_d6(dmlkit, here: Path, words: list[str]):
    result = dmlkit(*words)
    assert result.code == 2 and result.err.count("\n") == 1, result.err
    assert words[-1] in result.err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        *((["export", "emb", "--format", kind], "out") for kind in EMBEDDING_FORMATS),
        (["export", "run", "--format", "safetensors"], "out"),
        (["export", "run", "--format", "safetensors"], "out.json"),
        (["export", "emb", "--format", "faiss"], "out.items.parquet"),
        (["export", "emb", "--format", "faiss"], "out.manifest.json"),
        (["report", "st"], "thesis.md"),
        (PLOT, "p.png"),
        (PLOT, "p.svg"),
        ([*ARRAYS, "--metric", "recall@1"], "table.csv"),
    ],
    ids=str,
)
def test_what_nobody_can_tell_to_be_ours_survives_d6(dmlkit, here: Path, words: list[str], name: str):
    Path(name).write_text("class,queries,recall@1,notes\n")
    option = "--per-class" if words[0] == "eval" else "--output"
    output = name if name not in ("out.json", "out.items.parquet", "out.manifest.json") else "out"
    result = dmlkit(*words, option, output)
    assert result.code == 2 and result.err.count("\n") == 1, result.err
    assert result.err.startswith(f"error: {option} ") and name in result.err
    assert Path(name).read_text() == "class,queries,recall@1,notes\n"
    assert name == "out" or not Path("out").exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        *((["export", "emb", "--format", kind], "out.x") for kind in EMBEDDING_FORMATS),
        (["export", "run", "--format", "safetensors"], "out.x"),
        (["report", "st"], "out.md"),
        (PLOT, "out.png"),
        (PLOT, "out.svg"),
        ([*ARRAYS, "--metric", "recall@1"], "out.csv"),
    ],
    ids=str,
)
def test_what_the_command_has_written_it_writes_again_and_nothing_else_d6(dmlkit, here: Path, words, name: str):
    option = "--per-class" if words[0] == "eval" else "--output"
    for _ in range(2):
        result = dmlkit(*words, option, name)
        assert result.code == 0, result.err
    others = [kind for kind in EMBEDDING_FORMATS if kind != words[-1]] if words[1] == "emb" else []
    for kind in others:
        assert dmlkit("export", "emb", "--format", kind, option, name).code == 2


def test_two_indexes_never_share_their_items_d6(dmlkit, here: Path):
    for first, second in (("birds", "birds.faiss"), ("owls.faiss", "owls")):
        assert dmlkit("export", "emb", "--format", "faiss", "-o", first).code == 0
        result = dmlkit("export", "emb", "--format", "faiss", "-o", second)
        assert result.code == 2 and f"{first} already exists and uses the same" in result.err
        assert not Path(second).exists()


def test_a_plot_of_a_report_is_replaced_only_where_the_report_shows_it_d6(dmlkit, here: Path):
    Path("out").mkdir()
    Path("out/st.png").write_text("mine")
    result = dmlkit("report", "st", "-o", "out.md")
    assert result.code == 2 and "out/st.png" in result.err and Path("out/st.png").read_text() == "mine"
    assert not Path("out.md").exists()


@pytest.mark.parametrize("kind", [*EMBEDDING_FORMATS[:3], *MODEL_FORMATS])
@pytest.mark.parametrize("output", ["", "emb", "r.yaml/x"])
def test_an_output_that_can_be_no_file_is_one_line_t4(dmlkit, here: Path, kind: str, output: str):
    result = dmlkit("export", "emb" if kind in EMBEDDING_FORMATS else "run", "--format", kind, "-o", output)
    assert result.code == 2 and result.err.count("\n") == 1, result.err


def test_other_outputs_that_can_be_no_file_are_one_line_t4(dmlkit, here: Path):
    for words in (["export", "emb", "--format", "tensorboard"], ["report", "st"], PLOT, ARRAYS):
        for output in ("emb", "", "r.yaml/x.png", "r.yaml"):
            if words[1:] == ["emb", "--format", "tensorboard"] and output == "emb":
                continue  # a folder is what it expects
            result = dmlkit(*words, "--per-class" if words[0] == "eval" else "-o", output)
            assert result.code == 2 and result.err.count("\n") == 1, (words, output, result.err)


@pytest.mark.parametrize("kind", [*EMBEDDING_FORMATS, *MODEL_FORMATS, "lancedb", "qdrant", "pgvector"])
def test_an_empty_output_of_export_is_refused_before_anything_is_written_u2(dmlkit, here: Path, kind: str):
    before = set(here.rglob("*"))
    result = dmlkit("export", "run" if kind in MODEL_FORMATS else "emb", "--format", kind, "-o", "")
    assert result.code == 2 and result.err.count("\n") == 1 and "--output is empty" in result.err, result.err
    assert set(here.rglob("*")) == before


def test_pictures_are_known_by_their_metadata(tmp_path: Path):
    for suffix in (".png", ".svg"):
        path = tmp_path / f"p{suffix}"
        Figure().savefig(path)
        assert not is_our_picture(path)
        Figure().savefig(path, metadata=picture_metadata(path))
        assert is_our_picture(path)
    assert not is_our_picture(tmp_path / "p.jpg")


def test_a_link_to_a_source_is_the_source(tmp_path: Path):
    (tmp_path / "x.npy").write_text("x")
    (tmp_path / "link.npy").symlink_to(tmp_path / "x.npy")
    with pytest.raises(UserError, match="this command reads this file"):
        check_output(tmp_path / "link.npy", lambda _: True, sources=[tmp_path / "none", tmp_path / "x.npy"])


def test_a_write_that_fails_is_told_with_its_file_t4(tmp_path: Path):
    for error in (OSError(28, "No space left on device"), ValueError("I/O error\nmore")):
        with pytest.raises(UserError) as told, writing(tmp_path / "x", ValueError):
            raise error
        reason = "No space left on device" if isinstance(error, OSError) else "I/O error"
        assert str(told.value) == f"{tmp_path / 'x'}: cannot write this file: {reason}"


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
        [*PLOT, "-o", "out/x.svg"],
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
