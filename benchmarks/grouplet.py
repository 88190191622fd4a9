"""Grouplet compared with Proxy-Anchor at the same batch size: the loss alone, and a training step of the demo's model.

A step is forward, backward and AdamW on glyphs of 32 x 32 pixels with the demo's CNN; the losses run in turn in one
process. In the paper's Table 2, an epoch takes 65 s with Grouplet and 43 s with Proxy-Anchor, a ratio of 1.5.

Run: python benchmarks/grouplet.py
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from report import write_report
from torch import Tensor

from dmlkit.losses import Grouplet, ProxyAnchor
from dmlkit.losses.base import Loss
from dmlkit.manifolds.base import Manifold
from dmlkit.model import build_model
from dmlkit.recipe.file import read_recipe
from dmlkit.transport import Quadratic

BATCH, CLASSES, REPEATS = 120, 90, 20
LOSSES: dict[str, Callable[[Manifold], Loss]] = {
    "Proxy-Anchor": lambda manifold: ProxyAnchor(manifold, CLASSES),
    "Grouplet, exact": lambda manifold: Grouplet(manifold, CLASSES),
    "Grouplet, quadratic 1e-4": lambda manifold: Grouplet(manifold, CLASSES, solver=Quadratic()),
    "Grouplet, exact, k = 16": lambda manifold: Grouplet(manifold, CLASSES, group_size=16),
    "Grouplet, exact, scope batch": lambda manifold: Grouplet(manifold, CLASSES, scope="batch"),
}


def take_turns(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each step."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(REPEATS + 3):
        for name, step in steps.items():
            start = perf_counter()
            step()
            times[name].append(perf_counter() - start)
    return {name: median(values[3:]) for name, values in times.items()}


def loss_step(loss: Loss, embeddings: Tensor, labels: Tensor) -> Callable[[], object]:
    return lambda: loss(embeddings, labels).backward()


def training_step(loss: Loss, images: Tensor, labels: Tensor, model: torch.nn.Module) -> Callable[[], object]:
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    return step


def main() -> None:
    recipe = read_recipe(Path(__file__).parent.parent / "recipes" / "glyphs" / "proxy_anchor.yaml", [])
    data = recipe.dataset.build("train")
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:BATCH]
    images = torch.stack([data.sample(int(index)) for index in chosen])
    labels = data.labels[chosen]
    alone: dict[str, Callable[[], object]] = {}
    within: dict[str, Callable[[], object]] = {}
    for name, make in LOSSES.items():
        torch.manual_seed(0)
        model = build_model(recipe)
        embeddings = model(images).detach().requires_grad_()
        alone[name] = loss_step(make(model.manifold), embeddings, labels)
        within[name] = training_step(make(model.manifold), images, labels, model)
    losses, steps = take_turns(alone), take_turns(within)
    base = next(iter(LOSSES))
    rows = [
        [name, f"{losses[name] * 1e3:.2f}", f"{steps[name] * 1e3:.1f}", f"{steps[name] / steps[base]:.3f}x"]
        for name in LOSSES
    ]
    header = ["loss", "loss alone, ms", f"training step of {BATCH}, ms", "ratio to Proxy-Anchor's step"]
    write_report("grouplet", __doc__, header, rows)


if __name__ == "__main__":
    main()
