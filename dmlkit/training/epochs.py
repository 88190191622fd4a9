"""Curves of several runs over the epochs in one picture; runs that differ only in their seed share a curve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dmlkit.errors import UserError
from dmlkit.files.pictures import COLORS, DASHES, distinct_tails, picture, shortened
from dmlkit.recipe.file import dump_recipe
from dmlkit.run_folder.documents import EpochRow
from dmlkit.run_folder.folder import RunFolder

MARKERS = "osD^v*P"
LOG_RATIO = 50  # losses that span this much are drawn on a logarithmic axis
LONGEST_NAME = 40  # characters of a curve's name


@dataclass(frozen=True)
class EpochBand:
    """A figure per epoch: its mean over some runs, and the lowest and the highest run."""

    epochs: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]

    @classmethod
    def of(cls, runs: Sequence[Mapping[int, float]]) -> "EpochBand":
        """Return the band of figures by epoch, over the epochs that all runs have."""
        epochs = sorted(set.intersection(*(set(run) for run in runs)))
        values = [[run[epoch] for run in runs] for epoch in epochs]
        return cls(epochs, [fmean(row) for row in values], [min(row) for row in values], [max(row) for row in values])


@dataclass(frozen=True)
class EpochCurve:
    """The runs of one recipe."""

    name: str
    runs: int
    loss: EpochBand
    metric: EpochBand


def runs_by_recipe(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Group the runs whose recipes differ only in the seed, by the name of the first run of each group."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("plot: a run is given twice; give each run once")
    groups: dict[str, list[int]] = {}
    for index, path in enumerate(paths):
        recipe = RunFolder(path).recipe()
        groups.setdefault(dump_recipe(recipe.model_copy(update={"seed": 0})), []).append(index)
    tails = distinct_tails(paths)
    return {tails[indices[0]]: [paths[index] for index in indices] for indices in groups.values()}


def epoch_curves(groups: Mapping[str, Sequence[Path]], metric: str | None = None) -> tuple[str, list[EpochCurve]]:
    """Return the metric to show, by default that which selected the first run's checkpoint, and curves of groups."""
    first = next(iter(groups.values()))[0]
    metric = metric or RunFolder(first).recipe().training.select_by
    curves: list[EpochCurve] = []
    for name, paths in groups.items():
        rows = {path: RunFolder(path).read_metrics() for path in paths}
        figures = [_figures(path, run_rows, metric) for path, run_rows in rows.items()]
        losses = [{row.epoch: row.loss for row in run_rows} for run_rows in rows.values()]
        label = shortened(name, LONGEST_NAME) + (f" ({len(paths)} runs)" if len(paths) > 1 else "")
        curves.append(EpochCurve(label, len(paths), EpochBand.of(losses), EpochBand.of(figures)))
    return metric, curves


def _figures(path: Path, rows: Sequence[EpochRow], metric: str) -> dict[int, float]:
    """Return the figures of a run by epoch."""
    if not rows:
        raise UserError(f"{path}: no epoch is finished yet; expected metrics.jsonl with one line per epoch")
    figures = {row.epoch: row.validation[metric] for row in rows if row.validation and metric in row.validation}
    if not figures:
        known = sorted({name for row in rows for name in row.validation or {}})
        instead = f"choose one of {', '.join(known)} with --metric" if known else "its metrics.jsonl has no metrics"
        raise UserError(f"{path}: has no {metric} on validation classes; {instead}")
    return figures


def plot_epochs(groups: Mapping[str, Sequence[Path]], output: Path, *, metric: str | None = None) -> list[EpochCurve]:
    """Draw a metric on validation classes and the training loss over the epochs, one curve per group of runs."""
    metric, curves = epoch_curves(groups, metric)
    bands = any(curve.runs > 1 for curve in curves)
    with picture(output, 96 + 3.2 * len(curves)) as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        for axes, kind in ((above, "metric"), (below, "loss")):
            for number, curve in enumerate(curves):
                band: EpochBand = getattr(curve, kind)
                look = {"color": COLORS[number % len(COLORS)], "linestyle": DASHES[number % len(DASHES)]}
                marker = MARKERS[number % len(MARKERS)]
                axes.plot(band.epochs, band.mean, marker=marker, label=f"run {number}", **look)
                if curve.runs > 1:
                    axes.fill_between(band.epochs, band.low, band.high, color=look["color"], alpha=0.2, linewidth=0)
            axes.grid(alpha=0.3)
        above.set(title="Validation images, not trained on", ylabel=metric)
        below.set(title="Training", ylabel="loss", xlabel="epoch")
        below.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        losses = [value for curve in curves for value in (*curve.loss.low, *curve.loss.high)]
        if min(losses) > 0 and max(losses) / min(losses) >= LOG_RATIO:
            below.set_yscale("log")
            below.yaxis.set_major_formatter("{x:g}")  # its own writes powers as TeX, which pictures do not read
        title = "band: from the lowest run to the highest" if bands else None
        lines, _ = above.get_legend_handles_labels()
        legend = figure.legend(lines, ["name"] * len(lines), loc="outside lower center", frameon=False, title=title)
        legend.get_title().set_fontsize(6)
        for text, curve in zip(legend.get_texts(), curves, strict=True):
            text.set_text(curve.name)
    return curves
