"""Reliability diagrams: the share of answers that are right over their probability."""

from pathlib import Path

from dmlkit.files.pictures import COLORS, COLUMN, picture
from dmlkit.metrics.reliability import Reliability


def plot_reliability(found: Reliability, output: Path, *, title: str, share: str) -> Path:
    """Draw the bins of probabilities with their intervals, and the diagonal on which calibrated ones lie.

    Args:
        found: the bins, on classes that did not fit the probabilities.
        output: the file; one that dmlkit drew is replaced.
        title: what the probabilities are of.
        share: label of the vertical axis: what is counted.

    Returns:
        The file.

    Raises:
        UserError: the file cannot be written, or another program wrote it.

    Example:
        >>> from tempfile import mkdtemp
        >>> import numpy as np
        >>> from dmlkit.metrics.reliability import measure_reliability
        >>> said = np.linspace(0, 1, 100)
        >>> found = measure_reliability(said, said > 0.5, said > 0.5, np.arange(100) % 10)
        >>> plot_reliability(found, Path(mkdtemp()) / "a.png", title="Guesses", share="share that is right").exists()
        True
    """
    said, right = ([getattr(one, name) for one in found.bins] for name in ("probability", "share"))
    ends = [one.interval or (one.share, one.share) for one in found.bins]
    below = [max(0.0, value - low) for value, (low, _) in zip(right, ends, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(right, ends, strict=True)]
    with picture(output, COLUMN + 18) as figure:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=0.8, label="calibrated")
        label = "tenth of the answers" + ("" if found.error_interval is None else ", 95 % interval over classes")
        axes.errorbar(said, right, yerr=[below, above], fmt="o", color=COLORS[0], capsize=2, label=label)
        axes.set(
            title=f"{title}\n{_figure('calibration error', found.error, found.error_interval)}\n"
            + _figure("Brier score", found.brier, found.brier_interval),
            xlabel="probability",
            ylabel=share,
            xlim=(-0.02, 1.02),
            ylim=(-0.02, 1.02),
            aspect="equal",
        )
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return output


def _figure(name: str, value: float, ends: tuple[float, float] | None) -> str:
    return f"{name} {value:.3f}" + ("" if ends is None else f" ({ends[0]:.3f} to {ends[1]:.3f})")
