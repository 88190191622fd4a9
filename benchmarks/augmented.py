"""Test-time augmentation: retrieval by means of images and their copies, compared with images alone.

- `flip` is the mean of each image and its mirror image, `scales` that of each image and of copies of it with 0.71 and
  1.41 times the side. Both are of test classes, which the model was not trained on.
- `difference` is from the images alone, paired, with its 95 % interval over classes and its p-value.
- `x images` is how many times as many pixels are embedded.

Run: python benchmarks/augmented.py RUN... The runs were trained by dmlkit train: recipes/start/full_lite0.yaml with
transform.size=160, transform.resize=182 and one epoch on photos with one folder per product, and glyphs/proxy_anchor.
"""

import sys
from pathlib import Path
from typing import get_args

from report import write_report

from dmlkit.evaluation.augmented import Copies
from dmlkit.evaluation.run import evaluate_run
from dmlkit.metrics.statistics import paired_differences

METRICS = ("recall@1", "map@r")
COST = {"flip": "2", "scales": "3.5"}


def measure(run: Path) -> list[list[str]]:
    """Evaluate a run with each kind of copies."""
    rows: list[list[str]] = []
    for copies in get_args(Copies):
        found = evaluate_run(run, copies=copies, metrics=METRICS).evaluation
        assert found is not None and found.alternative is not None
        changes = paired_differences(found.scores.per_query, found.alternative.per_query, found.labels)
        for name, change in changes.items():
            values = f"{found.scores.values[name]:.4f}", f"{found.alternative.values[name]:.4f}"
            ends = f"{change.low:+.4f} .. {change.high:+.4f}"
            row = [run.name, copies, COST[copies], name, *values, f"{change.difference:+.4f}", ends]
            rows.append([*row, f"{change.p_value:.4f}"])
    return rows


def main() -> None:
    rows = [row for name in sys.argv[1:] for row in measure(Path(name))]
    header = ["run", "copies", "x images", "metric", "alone", "mean", "difference", "95 % interval", "p"]
    write_report("augmented", __doc__, header, rows)


if __name__ == "__main__":
    main()
