"""dmlkit plot as it is typed: which kind takes what, and what a mistake is told as."""

import shutil
from pathlib import Path

import pytest
from typer.main import get_command

from dmlkit.cli.app import app
from tests.conftest import TINY_RECIPE

STUDY = "claim: A claim\nrecipe: r.yaml\nseeds: [0, 1]\ngrid: {loss.margin: [0.1, 0.2, 0.3]}\n"
STUDY += "overrides: {training.epochs: 2, training.workers: 0, optimizer.lr: 0.003}\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of six runs."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "r.yaml").write_text(TINY_RECIPE)
    (folder / "study.yaml").write_text(STUDY)
    words = ["study", folder / "study.yaml", "-o", folder / "study", "--device", "cpu"]
    get_command(app).main([str(word) for word in words], standalone_mode=False)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to work in, with two runs of one recipe and one of another."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    runs = tmp_path / "here" / "study" / "runs"
    for name, source in (("one", "0.1/seed-0"), ("two", "0.1/seed-1"), ("other", "0.3/seed-0")):
        margin, _, seed = source.partition("/")
        (found,) = runs.glob(f"*{margin}*/**/{seed}")
        shutil.copytree(found, tmp_path / "here" / name)
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("words", "told", "written"),
    [
        (["one"], "36 images of 6 classes", "one/plots/test-pca.png"),
        (["one", "--kind", "pca", "--images", "--split", "train"], "18 images of 3 classes", "one/plots/train-pca.png"),
        (
            ["one", "--kind", "retrieval", "-k", "3", "--queries", "5"],
            "5 queries, 3 of them",
            "one/plots/test-retrieval.png",
        ),
        (["one", "--kind", "heatmap", "--split", "train"], "3 classes and 3 proxies", "one/plots/train-heatmap.png"),
        (["one", "--kind", "heatmap"], "--split train shows them", "one/plots/test-heatmap.png"),
        (["one", "--kind", "histogram"], "90 pairs of one class and 540 of two", "one/plots/test-histogram.png"),
        (["one", "--kind", "epochs"], "1 curve of 1 run", "one/plots/epochs.png"),
        (["one", "two", "other", "-o", "e.svg"], "2 curves of 3 runs", "e.svg"),
        (["study"], "3 variants, 2 seeds", "study/plots/results.png"),
        (["study", "-o", "new/claim.pdf", "--metric", "map@r"], "3 variants, 2 seeds", "new/claim.pdf"),
        (["study", "--kind", "epochs", "--metric", "map@r"], "3 variants, 2 seeds", "study/plots/epochs.png"),
    ],
)
def test_every_kind_is_drawn_and_drawn_again(dmlkit, here: Path, words: list[str], told: str, written: str):
    for _ in range(2):  # it knows its own
        result = dmlkit("plot", *words)
        assert result.code == 0, result.err
        assert told in " ".join(result.out.split())
    assert (here / written).stat().st_size > 2000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["one", "two", "--kind", "tsne"], "--kind tsne draws one run, got 2; several are drawn by --kind epochs"),
        (["one", "two"], "--output is needed"),
        (["one", "one", "-o", "e.png"], "a run is given twice"),
        (["one", "study", "-o", "e.png"], "study: no run here"),
        (["one", "--kind", "results"], "--kind results draws one study"),
        (["study", "--kind", "heatmap"], "--kind heatmap draws a run, and study is a study"),
        (["study", "--split", "train"], "--split is not for --kind results; it is for disk, pca, tsne"),
        (["one", "--kind", "epochs", "--images"], "--images is not for --kind epochs; it is for disk, pca, tsne"),
        (["one", "--queries", "4"], "--queries is not for --kind disk or pca; it is for retrieval"),
        (["one", "--kind", "retrieval", "--classes", "4"], "--classes is not for --kind retrieval"),
        (["one", "--kind", "tsne", "--metric", "map@r"], "--metric is not for --kind tsne; it is for epochs, results"),
        (["one", "--kind", "epochs", "--metric", "nonsense"], "choose one of map@r, recall@1"),
        (
            ["study", "--metric", "nonsense"],
            "not a metric of this study; expected one of recall@1, map@r",
        ),
        (["one", "-o", "e.jpg"], "e.jpg: expected a file name that ends in .png, .svg or .pdf"),
        (["one", "-o", "r.yaml"], "expected a file name that ends in"),
        (["none"], "none: no run here"),
        (["one", "--kind", "disk"], "the disk shows 2-d embeddings on poincare or lorentz"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(dmlkit, here: Path, words: list[str], told: str):
    before = sorted(here.rglob("*"))
    result = dmlkit("plot", *words)
    assert result.code == 2 and result.err.count("\n") == 1 and told in result.err, result.err
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_somebody_elses_picture_stays(dmlkit, here: Path, suffix: str):
    theirs = here / f"theirs{suffix}"
    theirs.write_bytes(b"not ours")
    result = dmlkit("plot", "one", "two", "-o", theirs)
    assert result.code == 2 and "nothing tells that this command has written it" in result.err
    assert theirs.read_bytes() == b"not ours"


def test_a_study_that_is_not_finished_says_how_to_go_on(dmlkit, here: Path):
    (here / "study" / "results.json").unlink()
    result = dmlkit("plot", "study")
    assert result.code == 2 and "this study is not finished; continue it with" in result.err


def test_a_study_whose_runs_are_gone_is_one_line(dmlkit, here: Path):
    shutil.rmtree(here / "study" / "runs")
    result = dmlkit("plot", "study", "--kind", "epochs")
    assert result.code == 2 and "its runs are missing" in result.err and result.err.count("\n") == 1
    assert dmlkit("plot", "study").code == 0
