"""Images to label next: nearest-neighbor accuracy with images chosen by `dmlkit select`, compared with random ones.

The embeddings are of test classes. For each of 5 seeds half of the images are held out, and 50 random images of the
other half get their label. Then four times 50 more get their label: by a rule of `dmlkit select`, or at random. The
accuracy is the share of held-out images whose nearest labeled image has their label. The model stays the same.

- `labels`: number of labeled images; `mean` is the mean over all numbers of labels but the first.
- `selected`, `random`: mean accuracies over the seeds.
- `difference`: selected - random, with the 95 % interval of Student's t over the seeds; the seeds differ in the images
  that are held out and in those drawn at random, so that it is an interval on these images, not on others.
- `verdict`: `better` if the interval is above 0, `worse` if it is below, else `not separable`.

The default rule, `coverage`, was chosen on the training classes of both (`--split train`).

Run: dmlkit train start/frozen_lite0 -o runs/grocery --set dataset.root=PHOTOS --set transform.size=160 --set
training.epochs=3
dmlkit train glyphs/proxy_anchor -o runs/glyphs --set dataset.images_per_class=24
dmlkit embed RUN --split test and dmlkit embed RUN --split train, for each; python benchmarks/selection.py
runs/*/embeddings/*. PHOTOS are those of the Grocery Store data set, one folder per product.
"""

import sys
from pathlib import Path

from report import write_report

from dmlkit.gallery.sources import open_points
from dmlkit.metrics.statistics import Comparison
from dmlkit.review.select import Rule, measure
from dmlkit.vectors.points import in_memory

COUNT = 50
RULES: tuple[Rule, ...] = ("coverage", "k_center")


def cells(change: Comparison) -> list[str]:
    """Return a difference and the verdict."""
    verdict = "better" if change.low > 0 else "worse" if change.high < 0 else "not separable"
    return [f"{change.difference:+.4f} ({change.low:+.4f} to {change.high:+.4f})", verdict]


def main() -> None:
    rows: list[list[str]] = []
    for name in sys.argv[1:]:
        points = in_memory(open_points(Path(name)))
        for rule in RULES:
            curve = measure(points, COUNT, rule=rule)
            prefix = [name, f"{curve.images:,}", str(curve.classes), rule]
            for point in curve.points[1:]:
                accuracies = [f"{value:.4f}" for value in (point.selected, point.random)]
                rows.append([*prefix, str(point.labels), *accuracies, *cells(point.difference)])
            rows.append([*prefix, "mean", "", "", *cells(curve.difference)])
    header = ["embeddings", "images", "classes", "rule", "labels", "selected", "random", "difference", "verdict"]
    write_report("selection", __doc__, header, rows)


if __name__ == "__main__":
    main()
