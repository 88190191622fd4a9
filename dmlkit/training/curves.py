"""Training curves as a picture."""

from collections.abc import Sequence
from math import nan
from pathlib import Path

from dmlkit.run_folder.documents import EpochRow, Metrics


def plot_curves(rows: Sequence[EpochRow], path: Path, *, untouched: Metrics | None = None) -> None:
    """Draw the loss and the validation metrics over the epochs as a PNG.

    Args:
        rows: of ``metrics.jsonl``.
        path: where to write.
        untouched: metrics of the backbone on validation classes before training: dashed lines.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):  # a $ in a name is a $
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot([row.epoch for row in rows], [row.loss for row in rows], marker=".")
        left.set(xlabel="epoch", ylabel="loss", title="Training loss")
        validated = [(row.epoch, row.validation) for row in rows if row.validation]
        names = list(validated[0][1]) if validated else []
        for name in names:
            (line,) = right.plot(
                [epoch for epoch, _ in validated],
                [metrics.get(name, nan) for _, metrics in validated],
                marker=".",
                label=name,
            )
            if untouched and name in untouched:
                right.axhline(untouched[name], linestyle="--", color=line.get_color(), label=f"{name}, untouched")
        right.set(xlabel="epoch", title="Validation classes" if names else "No validation classes", ylim=(0, 1.02))
        if names:
            right.legend(loc="lower right", fontsize="small")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.xaxis.get_major_locator().set_params(integer=True)
        figure.savefig(path, dpi=120, format="png")
