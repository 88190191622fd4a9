"""Protocols: fold sizes, what is trained and reported, and a kill half-way."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from typer.main import get_command

from dmlkit.cli.app import app
from dmlkit.datasets.base import class_fold
from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.in_memory import embed_dataset
from dmlkit.embedding.trained import load_model
from dmlkit.metrics import retrieval_metrics
from dmlkit.recipe.file import read_recipe
from dmlkit.run_folder.documents import Environment
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.protocol import ProtocolResults, concatenate, fold_recipe, summarize
from dmlkit.study.record import ProtocolRecord
from tests.conftest import TINY_RECIPE
from tests.processes import start, wait_until

RECIPE = TINY_RECIPE.replace("classes: 12", "classes: 32").replace("epochs: 3", "epochs: 2")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official protocol with one repeat. Tests copy it."""
    folder = tmp_path_factory.mktemp("official")
    (folder / "r.yaml").write_text(RECIPE)
    arguments = ["protocol", "official", str(folder / "r.yaml"), "-o", str(folder / "out"), "--repeats", "1"]
    get_command(app).main([*arguments, "--device", "cpu"], standalone_mode=False)
    return folder / "out"


@pytest.fixture
def official(trained_once: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained_once, tmp_path / "official", copy_function=shutil.copy2)


@pytest.mark.parametrize(
    ("classes", "sizes"), [(200, (75, 25, 100)), (196, (74, 24, 98)), (22_634, (8488, 2829, 11_317))]
)
def test_fold_sizes_of_the_benchmarks(classes, sizes):
    held_out = []
    for fold in range(4):
        parts = class_fold(classes, fold)
        assert tuple(len(parts[name]) for name in ("train", "validation", "test")) == sizes
        assert sorted([*parts["train"], *parts["validation"]]) == list(range(classes // 2))
        assert parts["test"] == list(range(classes // 2, classes))
        held_out += parts["validation"]
    assert len(set(held_out)) == len(held_out) == 4 * sizes[1]


def test_reality_check_trains_and_reports_what_it_says(dmlkit, recipe, tmp_path):
    out = tmp_path / "check"
    options = ("--repeats", "2", "--device", "cpu", "--json")
    # a recipe that otherwise trains on all classes: the protocol cuts its own fold for validation
    result = dmlkit("protocol", "reality_check", recipe, "-o", out, *options, "--set", "dataset.validation_fraction=0")
    assert result.code == 0, result.err
    results = json.loads(result.out)
    assert results == ProtocolResults.read(out / "results.json").plain()
    assert ProtocolRecord.read(out / "protocol.json").protocol == "reality_check"
    fabric = start_fabric("cpu")
    for repeat in range(2):
        parts, separated = [], []
        for fold in range(4):
            run = RunFolder(out / f"repeat-{repeat}" / f"fold-{fold}")
            trained = load_model(run, fabric, "best")
            assert (trained.recipe.seed, trained.recipe.dataset.fold) == (3 + repeat, fold)
            assert trained.recipe == fold_recipe(trained.recipe, fold)
            embeddings = embed_dataset(
                fabric, trained.model, trained.recipe.dataset.build("test"), trained.recipe.transform, workers=0
            )
            assert embeddings.points.shape == (16 * 6, 128)
            parts.append(embeddings.points.double().numpy())
            manifold = trained.model.manifold  # the default would normalize again, and swap near ties
            scores = retrieval_metrics(embeddings.points, embeddings.labels, manifold=manifold, metrics=["map@r"])
            separated.append(scores["map@r"])
            best = json.loads(run.summary_path.read_text())["best"]
            rows = run.read_metrics()
            assert best["validation"]["map@r"] == max(row.validation["map@r"] for row in rows)
        unit = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in parts]
        joined = np.concatenate(unit, 1)
        joined /= np.linalg.norm(joined, axis=1, keepdims=True)
        concatenated = retrieval_metrics(joined, embeddings.labels, metrics=["map@r"])["map@r"]
        figures = results["repeats"][repeat]
        assert figures["separated"]["map@r"] == pytest.approx(np.mean(separated), abs=1e-9)
        assert figures["concatenated"]["map@r"] == pytest.approx(concatenated, abs=5e-3)  # near ties of 96 queries
        assert set(figures["separated"]) == {"precision@1", "r_precision", "map@r"}
    values = [repeat["separated"]["map@r"] for repeat in results["repeats"]]
    low, high = stats.t.interval(0.95, 1, loc=np.mean(values), scale=stats.sem(values))
    summary = results["summary"]["separated"]["map@r"]
    assert (summary["mean"], summary["low"], summary["high"]) == pytest.approx((np.mean(values), low, high))
    assert "| separated | map@r |" in (out / "results.md").read_text()


@pytest.mark.heavy
@pytest.mark.slow
def test_a_protocol_killed_half_way_goes_on_to_the_same_figures(dmlkit, recipe, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert dmlkit("protocol", "reality_check", recipe, "-o", whole, "--repeats", "1", "--device", "cpu").code == 0
    process = start("protocol", "reality_check", recipe, "-o", cut, "--repeats", "1", "--device", "cpu")
    wait_until((cut / "repeat-0" / "fold-1" / "checkpoints" / "last.pt").exists, process)
    process.kill()
    process.communicate()
    assert not (cut / "results.json").exists()
    finished = (cut / "repeat-0" / "fold-0" / "summary.json").stat().st_mtime_ns
    assert dmlkit("protocol", "reality_check", recipe, "-o", cut, "--repeats", "1", "--device", "cpu").code == 0
    assert (cut / "repeat-0" / "fold-0" / "summary.json").stat().st_mtime_ns == finished
    assert json.loads((cut / "results.json").read_text()) == json.loads((whole / "results.json").read_text())


def test_a_run_killed_while_it_was_created_is_begun_again(dmlkit, recipe, tmp_path):
    (tmp_path / "o" / "repeat-0" / "checkpoints").mkdir(parents=True)
    Environment.here(read_recipe(recipe)).write(tmp_path / "o" / "repeat-0" / "environment.json")
    ProtocolRecord(protocol="official").write(tmp_path / "o" / "protocol.json")
    assert dmlkit("protocol", "official", recipe, "-o", tmp_path / "o", "--repeats", "1", "--device", "cpu").code == 0


def test_official_repeats_the_recipe_with_other_seeds_and_can_be_extended(dmlkit, recipe, official):
    out = official
    first = (out / "repeat-0" / "summary.json").stat().st_mtime_ns
    result = dmlkit("protocol", "official", recipe, "-o", out, "--repeats", "2", "--device", "cpu")
    assert result.code == 0 and "repeat 1" in result.out
    assert (out / "repeat-0" / "summary.json").stat().st_mtime_ns == first
    base = read_recipe(recipe)
    for repeat in range(2):
        run = RunFolder(out / f"repeat-{repeat}")
        assert run.recipe() == base.model_copy(update={"seed": 3 + repeat})
        best = json.loads(run.summary_path.read_text())["best"]["test"]
        assert json.loads((out / "results.json").read_text())["repeats"][repeat]["test"] == best


def test_another_recipe_in_the_folder_is_refused(dmlkit, recipe, official):
    words = (
        "protocol",
        "official",
        recipe,
        "-o",
        official,
        "--repeats",
        "1",
        "--device",
        "cpu",
        "--set",
        "loss.margin=0.3",
    )
    result = dmlkit(*words)
    assert result.code == 2 and "loss.margin: was 0.1, now 0.3" in result.err


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["official", "reality_check"])
@pytest.mark.parametrize("file", ["repeat-0/thesis.txt", "results.md", "results.json", "repeat-0/fold-0/recipe.yaml"])
def test_a_strangers_folder_is_refused_and_its_files_survive(dmlkit, recipe, tmp_path, name, file):
    out = tmp_path / "work"
    (out / file).parent.mkdir(parents=True)
    (out / file).write_text("mine")
    result = dmlkit("protocol", name, recipe, "-o", out, "--repeats", "1", "--device", "cpu")
    assert result.code == 2
    told = f"error: --output {out}: has {file.split('/')[0]} but not runs of a protocol; choose another --output"
    assert result.err.splitlines() == [told]
    assert all_files(out) == {file: b"mine"}
    result = dmlkit("protocol", name, recipe, "-o", out / file, "--repeats", "1", "--device", "cpu")
    assert result.code == 2 and f"{out / file}: this is a file" in result.err and all_files(out) == {file: b"mine"}


def test_a_strangers_files_beside_the_runs_survive(dmlkit, recipe, tmp_path):
    out = tmp_path / "work"
    ProtocolRecord(protocol="official").write(made(out) / "protocol.json")
    (made(out / "repeat-0") / "thesis.txt").write_text("mine")
    result = dmlkit("protocol", "official", recipe, "-o", out, "--repeats", "1", "--device", "cpu")
    assert result.code == 2 and f"{out / 'repeat-0'}: exists and is not a dmlkit run" in result.err
    assert set(all_files(out)) == {"protocol.json", "repeat-0/thesis.txt"}


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_another_protocol_in_the_folder_is_refused(dmlkit, recipe, official):
    out, before = official, all_files(official)
    refused = dmlkit("protocol", "reality_check", recipe, "-o", out, "--repeats", "1", "--device", "cpu")
    assert refused.code == 2 and all_files(out) == before
    told = f"error: {out}: has runs of protocol official, expected reality_check; choose another --output"
    assert refused.err.splitlines() == [told]


def test_a_record_whose_writing_was_cut_off_is_written_again(dmlkit, recipe, tmp_path):
    (made(tmp_path / "o") / f".protocol.json.{'0' * 32}.partial").write_text("{")
    assert dmlkit("protocol", "official", recipe, "-o", tmp_path / "o", "--repeats", "1", "--device", "cpu").code == 0
    assert ProtocolRecord.read(tmp_path / "o" / "protocol.json").protocol == "official"


def test_concatenation_gives_each_model_the_same_weight():
    parts = [torch.randn(5, 4), 100 * torch.randn(5, 3)]
    joined = concatenate(parts)
    assert joined.norm(dim=1).tolist() == pytest.approx([1] * 5)
    assert joined[:, :4].norm(dim=1).tolist() == pytest.approx([0.5**0.5] * 5)


def test_summary_of_one_repeat_has_no_interval():
    assert summarize([{"test": {"map@r": 0.5}}])["test"]["map@r"].low is None
