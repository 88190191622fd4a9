"""Curves of several runs: what is put together, and the bands."""

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dmlkit.errors import UserError
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.documents import EpochRow
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.epochs import EpochBand, epoch_curves, plot_epochs, runs_by_recipe
from tests.conftest import TINY_RECIPE


def run_at(folder: Path, values: list[float | None], *, seed: int = 0, margin: float = 0.1, scale: float = 1.0) -> Path:
    """A run whose loss is 10 less the epoch, times ``scale``, with these figures on validation classes."""
    recipe = TINY_RECIPE.replace("seed: 3", f"seed: {seed}").replace(
        "proxy_anchor}", f"proxy_anchor, margin: {margin}}}"
    )
    run = RunFolder(folder)
    run.create(parse_recipe(recipe, "recipe.yaml"), overwrite=False)
    for epoch, value in enumerate(values, start=1):
        figures = None if value is None else {"map@r": value, "recall@1": 1.0}
        row: dict[str, Any] = {"lr": 0.1, "images_per_second": 1.0, "waiting": 0.0, "seconds": 1.0}
        run.append_metrics(EpochRow(epoch=epoch, loss=scale * (10.0 - epoch), validation=figures, **row))
    return folder


def test_a_band_is_that_of_a_loop():
    runs = [{1: 0.1, 3: 0.4}, {1: 0.3, 2: 0.9, 3: 0.2}, {1: 0.2, 3: 0.9}]
    band = EpochBand.of(runs)
    assert band.epochs == [1, 3]  # the epochs that all have
    for epoch, mean, low, high in zip(band.epochs, band.mean, band.low, band.high, strict=True):
        values = [run[epoch] for run in runs]
        assert (mean, low, high) == (fmean(values), min(values), max(values))


def test_runs_that_differ_in_their_seed_alone_are_one_curve(tmp_path: Path):
    one, two = (run_at(tmp_path / f"a-{seed}", [0.1 + seed, 0.5], seed=seed) for seed in (0, 1))
    other = run_at(tmp_path / "b", [0.2, None, 0.3], margin=0.3)
    groups = runs_by_recipe([one, other, two])
    assert groups == {"a-0": [one, two], "b": [other]}
    metric, curves = epoch_curves(groups)
    assert metric == "map@r" and [curve.name for curve in curves] == ["a-0 (2 runs)", "b"]
    assert curves[0].metric == EpochBand([1, 2], [fmean([0.1, 1.1]), 0.5], [0.1, 0.5], [1.1, 0.5])
    assert curves[1].metric.epochs == [1, 3] and curves[1].loss.mean == [9.0, 8.0, 7.0]


def test_the_picture_is_written_with_names_as_they_are(tmp_path: Path):
    one = run_at(tmp_path / "_$x$", [0.1, 0.5])
    two = run_at(tmp_path / "b\x1b[31m", [0.2, 0.3], margin=0.3)
    curves = plot_epochs(runs_by_recipe([one, two]), tmp_path / "p.svg", metric="recall@1")
    assert [curve.name for curve in curves] == ["_$x$", "b\\x1b[31m"]
    assert all(curve.name in (tmp_path / "p.svg").read_text() for curve in curves)


def test_an_axis_of_losses_that_span_much_has_numbers_and_one_of_epochs_whole_ones(tmp_path: Path):
    one, two = run_at(tmp_path / "a", [0.1]), run_at(tmp_path / "b", [0.2], margin=0.3, scale=0.01)
    plot_epochs(runs_by_recipe([one, two]), tmp_path / "p.svg")
    texts = re.findall("<!-- (.*?) -->", (tmp_path / "p.svg").read_text())
    assert {"0.1", "1"} <= {*texts} and not [text for text in texts if "$" in text or "0.98" in text]


def test_runs_without_figures_are_one_line(tmp_path: Path):
    good, empty, blind = (
        run_at(tmp_path / "good", [0.1]),
        run_at(tmp_path / "empty", []),
        run_at(tmp_path / "blind", [None, None]),
    )
    for paths, metric, message in (
        ([good, good], None, "a run is given twice"),
        ([empty], None, "empty: no epoch is finished yet"),
        ([blind], None, "blind: has no map@r on validation classes; its metrics.jsonl has no metrics"),
        ([good], "map@k", "good: has no map@k on validation classes; choose one of map@r, recall@1"),
        ([good, tmp_path / "none"], None, "none: no run here"),
    ):
        with pytest.raises(UserError, match=message):
            epoch_curves(runs_by_recipe(paths), metric)
