"""What transport changes: R@1 and MAP@R of Grouplet's solvers, gradients and scopes on unseen glyphs.

Every variant trains `recipes/glyphs/grouplet.yaml` once per seed; the table gives mean and standard deviation over
the seeds of the last checkpoint on the test classes, and the difference to Proxy-Anchor seed by seed. 3 seeds tell
1 % apart at best: read a difference within its deviation as "nothing".

Run: python benchmarks/grouplet_study.py [--seeds 0 1 2] [--epochs 12]
"""

import argparse
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from report import write_report
from rich.console import Console

from dmlkit.devices import start_fabric
from dmlkit.progress import TrainingProgress
from dmlkit.recipe_file import read_recipe
from dmlkit.train import train

RECIPES = Path(__file__).parent.parent / "recipes" / "glyphs"
BASELINE = "Proxy-Anchor"
SINKHORN = "name: sinkhorn, regularization: 0.1"
VARIANTS: dict[str, tuple[str, list[str]]] = {
    BASELINE: ("proxy_anchor", []),
    "grouplets, exact plan (no gradient)": ("grouplet", []),
    "grouplets, quadratic eps 1e-4 (the paper's)": ("grouplet", ["loss.solver={name: quadratic}"]),
    "grouplets, quadratic eps 0.1": ("grouplet", ["loss.solver={name: quadratic, regularization: 0.1}"]),
    "grouplets, Sinkhorn eps 0.1, implicit": ("grouplet", [f"loss.solver={{{SINKHORN}}}"]),
    "grouplets, Sinkhorn eps 0.1, envelope (no gradient)": (
        "grouplet",
        [f"loss.solver={{{SINKHORN}, gradient: envelope}}"],
    ),
    "batch, exact plan (no gradient)": ("grouplet", ["loss.scope=batch"]),
    "batch, quadratic eps 0.1": (
        "grouplet",
        ["loss.scope=batch", "loss.solver={name: quadratic, regularization: 0.1}"],
    ),
    "grouplets of 1: plans say nothing": ("grouplet", ["loss.group_size=1"]),
}


def test_metrics(name: str, overrides: list[str], seed: int, epochs: int) -> dict[str, Any]:
    recipe = read_recipe(RECIPES / f"{name}.yaml", [*overrides, f"seed={seed}", f"training.epochs={epochs}"])
    with tempfile.TemporaryDirectory() as folder:
        progress = TrainingProgress(Console(quiet=True), epochs)
        return train(recipe, Path(folder) / "run", start_fabric("auto"), progress)["last"]["test"]


def spread(values: list[float]) -> str:
    deviation = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=12)
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    rows: list[list[str]] = []
    for label, (name, overrides) in VARIANTS.items():
        results[label] = [test_metrics(name, overrides, seed, arguments.epochs) for seed in arguments.seeds]
        row = [label]
        for metric in ("recall@1", "map@r"):
            values = [result[metric] for result in results[label]]
            base = [result[metric] for result in results[BASELINE]]
            row += [spread(values), spread([a - b for a, b in zip(values, base, strict=True)])]
        rows.append(row)
        print(" | ".join(row), flush=True)
    header = ["loss", "R@1, %", "minus Proxy-Anchor", "MAP@R, %", "minus Proxy-Anchor"]
    write_report("grouplet_study", __doc__, header, rows)


if __name__ == "__main__":
    main()
