"""Picture of a study's figures per variant or over the swept key, and the runs for curves over epochs."""

from pathlib import Path
from typing import Any

from dmlkit.errors import UserError
from dmlkit.files.outputs import picture_metadata
from dmlkit.files.pictures import COLUMN, LOOK, MM
from dmlkit.study.definition.config import Axis
from dmlkit.study.findings.results import StudyResults, VariantResults

LOG_RATIO = 10  # swept values with at least this ratio are drawn on a logarithmic axis
COLOR, FAINT = "#2060a0", "#9ab8d8"


def plot_study(
    results: StudyResults, path: Path, suffix: str = ".png", *, metrics: tuple[str, ...] | None = None
) -> None:
    """Draw the mean and 95 % interval of every variant, and each run as a faint dot, in one panel per metric.

    A bar marks the network before training where it lies among the runs. For a swept numeric key a curve with a band is
    drawn over its values. The axis of the figures does not start at 0, so means are drawn as points and not as bars.

    Args:
        metrics: metrics to draw, each as wide as a column. Default: all metrics of the study.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names, metrics = list(results.variants), metrics or results.metrics
    height = 62.0 if results.axis else 16 + 5.5 * len(names)
    with rc_context(LOOK):
        figure = Figure(figsize=(COLUMN * MM * len(metrics), height * MM), layout="constrained")
        panels = figure.subplots(1, len(metrics), squeeze=False, sharey=not results.axis)[0]
        for axes, metric in zip(panels, metrics, strict=True):
            if results.axis:
                _draw_curve(axes, metric, list(results.variants.values()), results.axis)
            else:
                _draw_points(axes, metric, results.variants)
            axes.grid(alpha=0.3)
        metadata = picture_metadata(Path(f"results{suffix}"))
        figure.savefig(path, dpi=300, format=suffix.removeprefix("."), metadata=metadata)


def requested_metrics(results: StudyResults, metric: str | None) -> tuple[str, ...]:
    """Return the requested metric of a study, or all metrics.

    Raises:
        UserError: the study does not have the metric.
    """
    if metric is None:
        return results.metrics
    if metric not in results.metrics:
        raise UserError(f"--metric {metric}: not a metric of this study; expected one of {', '.join(results.metrics)}")
    return (metric,)


def epoch_groups(folder: Path, results: StudyResults) -> dict[str, list[Path]]:
    """Return the runs that a study reports, by variant; all folds of a Reality Check.

    Raises:
        UserError: runs are missing.
    """
    groups: dict[str, list[Path]] = {}
    for name, variant in results.variants.items():
        chosen = folder / "runs" / name / (variant.tuned.chosen if variant.tuned else "")
        groups[name] = [
            file.parent for seed in variant.runs for file in sorted(chosen.glob(f"**/seed-{seed}/**/metrics.jsonl"))
        ]
        if not groups[name]:
            raise UserError(
                f"{chosen}: its runs are missing, so there are no curves; train them with the study's command"
            )
    return groups


def _draw_points(axes: Any, metric: str, named: dict[str, VariantResults]) -> None:
    variants = list(named.values())
    means, below, above = _means(variants, metric)
    places = range(len(variants))
    for place, variant in zip(places, variants, strict=True):
        runs = [run[metric] for run in variant.runs.values()]
        axes.plot(runs, [place] * len(runs), "o", color=FAINT, markersize=2.5)
    axes.errorbar(means, places, xerr=[below, above], fmt="o", color=COLOR, capsize=2, markersize=3.5)
    axes.locator_params(axis="x", nbins=5)  # more labels would overlap
    axes.set_yticks(places, list(named))
    least, most = axes.get_xlim()  # random weights are far below, and would squeeze the runs together
    before = {
        place: value
        for place, variant in zip(places, variants, strict=True)
        if variant.untrained is not None and least <= (value := variant.untrained[metric]) <= most
    }
    axes.plot(list(before.values()), list(before), "|", color="black", markersize=8)
    axes.set(
        title=f"{metric} of test classes\nmean, 95 % interval, each run{'; | before training' if before else ''}",
        xlabel=metric,
        ylim=(len(variants) - 0.5, -0.5),
    )


def _draw_curve(axes: Any, metric: str, variants: list[VariantResults], axis: Axis) -> None:
    order = sorted(range(len(axis.values)), key=axis.values.__getitem__)
    variants, values = [variants[index] for index in order], [axis.values[index] for index in order]
    means, below, above = _means(variants, metric)
    for value, variant in zip(values, variants, strict=True):
        runs = [run[metric] for run in variant.runs.values()]
        axes.plot([value] * len(runs), runs, "o", color=FAINT, markersize=2.5)
    axes.plot(values, means, "o-", color=COLOR, markersize=3.5)
    low, high = (
        [mean + sign * size for mean, size in zip(means, sizes, strict=True)]
        for sign, sizes in ((-1, below), (1, above))
    )
    axes.fill_between(values, low, high, color=COLOR, alpha=0.2, linewidth=0)
    if values[0] > 0 and values[-1] / values[0] >= LOG_RATIO:
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set(title=f"{metric} of test classes\nmean, 95 % interval, each run", xlabel=axis.key, ylabel=metric)


def _means(variants: list[VariantResults], metric: str) -> tuple[list[float], list[float], list[float]]:
    """Return means, and the extents of their intervals below and above; 0 for a single run."""
    summaries = [variant.summary[metric] for variant in variants]
    below = [0.0 if one.low is None else one.mean - one.low for one in summaries]
    above = [0.0 if one.high is None else one.high - one.mean for one in summaries]
    return [one.mean for one in summaries], below, above
