"""Reliability diagrams: the points and intervals that are drawn."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from dmlkit.errors import UserError
from dmlkit.evaluation.plots import reliability
from dmlkit.evaluation.plots.reliability import plot_reliability
from dmlkit.metrics.reliability import measure_reliability


@pytest.mark.parametrize("classes", [20, 3])
def test_bins_and_their_intervals_are_drawn(classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    generator = np.random.default_rng(0)
    said = generator.random(400)
    found = measure_reliability(said, generator.random(400) < said, said < 0, np.arange(400) % classes)
    figure = Figure()

    @contextmanager
    def captured(path: Path, height: float):
        yield figure

    monkeypatch.setattr(reliability, "picture", captured)
    plot_reliability(found, tmp_path / "a.png", title="Pairs", share="share of the same class")
    (axes,) = figure.axes
    (bars,) = axes.containers
    line, _, (stems,) = bars
    assert np.array(line.get_xydata()) == pytest.approx(np.array([(one.probability, one.share) for one in found.bins]))
    ends = [one.interval or (one.share, one.share) for one in found.bins]
    assert np.array(stems.get_segments())[:, :, 1] == pytest.approx(np.array(ends))
    assert axes.get_title().startswith("Pairs\n") and f"calibration error {found.error:.3f}" in axes.get_title()
    assert axes.get_ylabel() == "share of the same class"
    legend = figure.legends[0].get_texts()[1].get_text()
    assert ("95 % interval" in legend) == (" to " in axes.get_title()) == (classes == 20)


def test_the_picture_is_written_and_no_other_file_replaced(tmp_path: Path):
    said = np.linspace(0, 1, 50)
    found = measure_reliability(said, said > 0.5, said > 0.5, np.arange(50) % 10)
    for _ in range(2):
        path = plot_reliability(found, tmp_path / "plots" / "a.png", title="Pairs", share="right")
        assert path.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "b.png").write_bytes(b"not ours")
    with pytest.raises(UserError, match="was not written by this command"):
        plot_reliability(found, tmp_path / "b.png", title="Pairs", share="right")
