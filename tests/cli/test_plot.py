"""Command lines of dmlkit plot: the options of each kind, and the messages for user errors."""

import shutil
from pathlib import Path

import pytest
from typer.main import get_command

from dmlkit.cli.app import app
from tests.conftest import ROOT, TINY_RECIPE

pytestmark = pytest.mark.usefixtures("pictures_are_drawn")
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
    for name, run in (("one", "margin=0.1/seed-0"), ("two", "margin=0.1/seed-1"), ("other", "margin=0.3/seed-0")):
        shutil.copytree(Path("study/runs", run), name)
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("words", "message", "written"),
    [
        ("pca one", "36 images of 6 classes", "one/plots/test-pca.png"),
        ("pca one --thumbnails --split train", "18 images of 3 classes", "one/plots/train-pca.png"),
        ("retrieval one -k 3 -n 5", "5 queries, including the 3 worst", "one/plots/test-retrieval.png"),
        ("heatmap one --split train", "3 classes and 3 proxies", "one/plots/train-heatmap.png"),
        ("heatmap one", "use --split train", "one/plots/test-heatmap.png"),
        ("histogram one", "90 same-class pairs and 540 different-class", "one/plots/test-histogram.png"),
        ("epochs one", "1 curve of 1 run", "one/plots/epochs.png"),
        ("epochs one two other -o e.svg", "2 curves of 3 runs", "e.svg"),
        ("results study", "3 variants, 2 seeds", "study/plots/results.png"),
        ("results study -o new/claim.pdf --metric map@r", "3 variants, 2 seeds", "new/claim.pdf"),
        ("epochs study --metric map@r", "3 variants, 2 seeds", "study/plots/epochs.png"),
    ],
)
def test_every_kind_is_drawn(dmlkit, here: Path, words: str, message: str, written: str):
    assert message in " ".join(dmlkit("plot", *words.split()).ok().out.split())
    assert (here / written).stat().st_size > 2000


def test_a_picture_replaces_the_one_before(dmlkit, here: Path):
    pictures = set[bytes]()
    for kind in ("epochs", "histogram"):
        assert dmlkit("plot", kind, "one", "-o", "again.png").code == 0
        pictures.add((here / "again.png").read_bytes())
    assert len(pictures) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("epochs one two", "the curves of 2 runs need --output FILE"),
        ("epochs one one -o e.png", "a run is given twice"),
        ("epochs one --metric nonsense", "choose one of map@r, recall@1"),
        ("results study --metric nonsense", "not a metric of this study; expected one of recall@1, map@r"),
        ("pca one -o e.jpg", "e.jpg: expected a name that ends in .png, .svg or .pdf"),
        ("disk one", "the disk shows 2-d embeddings on poincare or lorentz"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(dmlkit, here: Path, words: str, message: str):
    before = sorted(here.rglob("*"))
    dmlkit("plot", *words.split()).refused(message)
    assert sorted(here.rglob("*")) == before  # not even embeddings: every mistake is found before they are computed


def test_a_study_whose_runs_are_gone_or_that_is_not_finished_is_one_line(dmlkit, here: Path):
    shutil.rmtree(here / "study" / "runs")
    dmlkit("plot", "epochs", "study").refused("its runs are missing")
    assert dmlkit("plot", "results", "study").code == 0
    (here / "study" / "results.json").unlink()
    dmlkit("plot", "results", "study").refused("this study is not finished; continue it with")


def test_another_checkpoint_has_a_picture_of_its_own(dmlkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(shutil.copytree(ROOT / "tests/fixtures/0.1.0", tmp_path / "files"))
    words, pictures = ("plot", "pca", "run", "--device", "cpu"), Path("run/plots")
    dmlkit(*words).ok()
    best = (pictures / "test-pca.png").read_bytes()
    dmlkit(*words, "--checkpoint", "last").ok()
    assert (pictures / "test-pca.png").read_bytes() == best
    assert {path.name for path in pictures.iterdir()} == {"test-pca.png", "test-last-pca.png"}
