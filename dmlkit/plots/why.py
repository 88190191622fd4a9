"""Pictures of why two images are similar: heat maps of what each patch is worth, and lines between those that match."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmlkit.files.pictures import COLORS, COLUMN, picture, shortened
from dmlkit.identify.why import Explanation


def plot_explanation(explanation: Explanation, images: Tensor, output: Path, *, lines: int) -> Path:
    """Draw two images with a heat map of how much each patch is needed, and lines between the strongest pairs."""
    from matplotlib.patches import ConnectionPatch

    heat = torch.tensor(explanation.falls, dtype=torch.float64).unflatten(1, explanation.grid)
    most = float(heat.abs().max()) or 1.0
    (rows, columns), size = explanation.grid, images.shape[-1]
    with picture(output, COLUMN * 0.75) as figure:
        sides = figure.subplots(1, 2)
        shades: list[Any] = []
        look = {"extent": (-0.5, size - 0.5, size - 0.5, -0.5), "cmap": "coolwarm", "vmin": -most, "vmax": most}
        for axes, image, heated, path in zip(sides, images, heat, (explanation.a, explanation.b), strict=True):
            axes.imshow(image.permute(1, 2, 0).numpy())
            shades.append(axes.imshow(heated.numpy(), alpha=0.5, interpolation="nearest", **look))
            axes.set_title(shortened(Path(path).name, 28))
            axes.set_axis_off()
        for a, b, _ in explanation.strongest(lines):
            start, end = (
                ((patch % columns + 0.5) * size / columns - 0.5, (patch // columns + 0.5) * size / rows - 0.5)
                for patch in (a, b)
            )
            line = ConnectionPatch(start, end, "data", "data", axesA=sides[0], axesB=sides[1], color=COLORS[6])
            line.set(linewidth=0.7, alpha=0.8, in_layout=False)
            figure.add_artist(line)
        bar = figure.colorbar(shades[0], ax=sides, location="bottom", shrink=0.6, aspect=40)
        name = explanation.similarity.replace("_", " ")
        bar.set_label(f"fall of the {name} of {explanation.score:.3f} if the patch is painted over")
    return output
