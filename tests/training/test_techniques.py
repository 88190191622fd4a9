"""Techniques at test time that a recipe names: validation chooses, against NumPy loops over single images."""

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import dmlkit as package
from dmlkit.cli.console import Output
from dmlkit.cli.train import print_figures
from dmlkit.run_folder.documents import Summary
from dmlkit.run_folder.folder import RunFolder
from tests.conftest import ONE_EPOCH, Result
from tests.metrics.test_rerank import naive_k_reciprocal

Cli = Callable[..., Result]
RERANK = "k_reciprocal:k1=4,k2=2"
RECIPE = (
    ONE_EPOCH.replace("classes: 12", "classes: 36")
    .replace("fraction: 0.34", "fraction: 0.5")
    .replace("epochs: 1", "epochs: 6")  # after fewer, all cosines are nearly 1: float32 orders them by rounding
    + f"evaluation: {{tta: flip, rerank: '{RERANK}'}}\n"
)


def map_at_r(similarity: np.ndarray, labels: np.ndarray) -> float:
    values: list[float] = []
    for row, label in enumerate(labels):
        order = [other for other in np.argsort(-similarity[row], kind="stable") if other != row]
        hits = labels[order] == label
        count = int(hits.sum())
        first = hits[:count]
        values.append(float((first * np.cumsum(first) / np.arange(1, count + 1)).sum() / count))
    return float(np.mean(values))


def naive_figures(run: Path, split: str) -> dict[str, float]:
    dataset, model = RunFolder(run).recipe().dataset.build(split), package.load(run, device="cpu")
    images = [dataset.sample(row).permute(1, 2, 0).numpy() for row in range(len(dataset))]
    plain, mirrored = model.embed(images), model.embed([np.ascontiguousarray(image[:, ::-1]) for image in images])
    mean = plain + mirrored
    mean /= np.linalg.norm(mean, axis=1, keepdims=True)
    figures: dict[str, float] = {}
    for name, points in (("", plain), ("flip", mean)):
        similarity = points.astype(np.float64) @ points.T.astype(np.float64)
        labels = dataset.labels.numpy()
        figures[name or "plain"] = map_at_r(similarity, labels)
        ranked_again = map_at_r(-naive_k_reciprocal(similarity, 4, 2, 0.3), labels)
        figures[", ".join(filter(None, (name, RERANK)))] = ranked_again
    return figures


@pytest.mark.slow
def test_validation_chooses_and_the_test_figures_are_next_to_the_plain_ones(tmp_path, dmlkit, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    run = tmp_path / "run"
    result = dmlkit("train", tmp_path / "recipe.yaml", "-o", run, "--device", "cpu").ok()
    summary = json.loads((run / "summary.json").read_text())
    chosen, expected = summary["techniques"], naive_figures(run, "validation")
    assert chosen["validation"] == pytest.approx(expected, abs=2e-3)
    assert list(chosen["validation"]) == ["plain", RERANK, "flip", f"flip, {RERANK}"]
    best = max(chosen["validation"], key=lambda name: chosen["validation"][name])
    assert ", ".join(filter(None, (chosen["tta"], chosen["rerank"]))) == best != "plain"
    assert f"at test time: {best} (map@r on validation: plain {chosen['validation']['plain']:.3f}," in " ".join(
        result.out.split()
    )
    assert chosen["test"]["map@r"] == pytest.approx(naive_figures(run, "test")[best], abs=2e-3)
    screen, read = Console(file=StringIO(), width=80), Summary.read(RunFolder(run).summary_path)
    none = read.techniques.model_copy(update={"tta": None, "rerank": None})
    with monkeypatch.context() as patch:
        patch.setattr(Output, "console", screen)
        print_figures(read.model_copy(update={"techniques": none}), "map@r")
    assert "at test time: plain" in screen.file.getvalue() and "plain  test" not in screen.file.getvalue()
    report = dmlkit("eval", run, "--json", "--device", "cpu").json()
    assert report["metrics"] == pytest.approx(summary["best"]["test"])
    found = report["alternative"]
    assert found["metrics"] == pytest.approx(chosen["test"]) and found["tta"] == chosen["tta"]
    assert found["rerank"] == (chosen["rerank"] and "k_reciprocal")
    other = dmlkit("eval", run, "--json", "--with", "scales", "--device", "cpu").json()["alternative"]
    assert (other["tta"], other["rerank"]) == ("scales", None)  # what is asked for replaces them


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k1=4": "k1=400"}, "evaluation.rerank: k1: expected 1 to"),
        ({"k_reciprocal": "reciprocal"}, "evaluation.rerank: unknown method 'reciprocal'; expected k_reciprocal or"),
        ({"k1=4": "k=4"}, "evaluation.rerank: k_reciprocal has no option 'k'"),
        ({"tta: flip": "tta: mirror"}, "evaluation.tta: got 'mirror', expected 'flip' or 'scales'"),
        (
            {"workers: 0": "workers: 0, select_by: nmi", "metrics: [": "metrics: [{name: nmi}, "},
            "evaluation: is chosen by training.select_by, and nmi ranks no gallery; use e.g. map@r",
        ),
    ],
)
def test_mistakes_are_refused_before_training(change: dict[str, str], message: str, tmp_path: Path, dmlkit: Cli):
    recipe = RECIPE
    for old, new in change.items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    (tmp_path / "recipe.yaml").write_text(recipe)
    result = dmlkit("train", tmp_path / "recipe.yaml", "-o", tmp_path / "run", "--device", "cpu")
    assert result.code == 2 and message in result.err and result.err.count("\n") == 1, result.err
    assert not (tmp_path / "run").exists()
