"""Runs, checkpoints and embeddings of commit 9d2330f, before documents had a format, are of use still.

tests/data/run_9d2330f holds two runs of one recipe, of 3 epochs: ``whole``, evaluated and embedded, and ``stopped``,
ended in its third epoch by an error, so that its last checkpoint is of the second.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.run_folder.documents import EpochRow, Summary, TrainingClasses
from dmlkit.run_folder.folder import RunFolder
from tests.conftest import ROOT

OLD = ROOT / "tests" / "data" / "run_9d2330f"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "runs"))


def test_the_documents_of_an_old_run_are_read(runs: Path):
    written = json.loads((runs / "whole" / "summary.json").read_text())
    summary = Summary.read(runs / "whole" / "summary.json")
    assert summary.best and summary.best.test == written["best"]["test"] and summary.last.epoch == 3
    assert summary.untouched is None and summary.seconds_per_epoch is None and summary.peak_memory_bytes is None
    assert [row.epoch for row in RunFolder(runs / "whole").read_metrics()] == [1, 2, 3]
    assert len(TrainingClasses.read(runs / "whole" / "classes.json").training_classes) > 1


def test_an_old_run_evaluates_to_its_figures(dmlkit, runs: Path):
    result = dmlkit("eval", runs / "whole", "--json", "--device", "cpu")
    assert result.code == 0, result.err
    expected = json.loads((OLD / "whole" / "evaluations" / "test-best.json").read_text())
    found = json.loads(result.out)
    assert found["metrics"] == pytest.approx(expected["metrics"]) and found["images"] == expected["images"]
    assert found["question"]["weights"] == expected["model"]


def test_compare_asks_an_old_run_again(dmlkit, runs: Path):
    shutil.copytree(runs / "whole", runs / "copy")
    result = dmlkit("compare", runs / "whole", runs / "copy", "--json", "--device", "cpu")
    assert result.code == 0, result.err
    expected = json.loads((OLD / "whole" / "evaluations" / "test-best.json").read_text())
    assert json.loads(result.out)["runs"][0]["metrics"] == pytest.approx(expected["metrics"])


def test_an_old_run_embeds_to_the_same_points_and_its_embeddings_are_read(dmlkit, runs: Path, tmp_path: Path):
    old = EmbeddingFolder(runs / "whole" / "embeddings" / "test")
    assert dmlkit("embed", runs / "whole", "--split", "test", "-o", tmp_path / "e", "--device", "cpu").code == 0
    new = EmbeddingFolder(tmp_path / "e")
    np.testing.assert_allclose(new.points, old.points, atol=1e-6)
    assert new.items["path"].to_pylist() == old.items["path"].to_pylist()
    assert new.manifest.model.fingerprint == old.manifest.model.fingerprint
    assert dmlkit("eval", runs / "whole" / "embeddings" / "test").code == 0


def test_an_old_run_goes_on_to_the_end_of_an_unbroken_one(dmlkit, runs: Path):
    recipe = runs / "stopped" / "recipe.yaml"
    result = dmlkit("train", recipe, "-o", runs / "stopped", "--resume", "--device", "cpu")
    assert result.code == 0, result.err
    expected = json.loads((OLD / "whole" / "summary.json").read_text())
    found = Summary.read(runs / "stopped" / "summary.json")
    assert found.last.test == pytest.approx(expected["last"]["test"], abs=1e-6)
    rows = [EpochRow.from_json(line, "old") for line in (OLD / "whole" / "metrics.jsonl").read_text().splitlines()]
    resumed = RunFolder(runs / "stopped").read_metrics()
    assert [row.loss for row in resumed] == pytest.approx([row.loss for row in rows], rel=1e-5)


def test_embeddings_of_format_1_are_read_without_their_formulas_s9(dmlkit, runs: Path):
    folder = runs / "whole" / "embeddings" / "test"
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["index"]["query"] = "__import__('os').system('echo obeyed')"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert EmbeddingFolder(folder).manifest.index.form == "as_is"
    assert dmlkit("export", folder, "--format", "faiss").code == 0
    assert "import" not in (folder / "index.manifest.json").read_text()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"format": 3}, "of format 3"),
        ({"format": [1]}, "of format [1]"),
        ({"manifold": {}}, "manifold"),
        ({"features": None}, "features"),
        ({"format": 2}, "index.form: field required"),
    ],
    ids=str,
)
def test_a_manifest_of_another_version_is_one_line_s9(dmlkit, runs: Path, keys: dict, told: str):
    folder = runs / "whole" / "embeddings" / "test"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | keys))
    result = dmlkit("eval", folder)
    assert result.code == 2 and result.err.count("\n") == 1 and "manifest of embeddings" in result.err
    assert told in result.err
