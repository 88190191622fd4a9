"""Identification: how often the interval of a gallery's calibration contains the rate measured on other labels.

Labels that the model was not trained on are divided at random, 200 times: a third are enrolled in the gallery with at
most 10 images each, a sixth are used as strangers for the calibration, and half are strangers for the test, together
with at most 30 other images of each enrolled label. The test and the calibration use the same number of labels.
The images of the test are also divided at random into groups of one label, which get one answer each, as by
`dmlkit identify --by`; their probability and its threshold are those of the largest size that is calibrated.

- `images`: number of images of a group, 1 for single images.
- `target`: the FPIR for which the gallery is calibrated.
- `FPIR`: mean share of the strangers of the test that got a label.
- `covered`: share of the divisions in which this rate lies in the stated 95 % interval.
- `FNIR`: share of the test images of enrolled labels that did not get their own label, with the calibrated probability.
- `by score`: the same with a threshold on the similarity alone, chosen on the same images for the same FPIR.
- `error`: mean over the divisions of the expected calibration error of the probabilities of the test images, if every
  second one is a stranger; `pooled` is the error over the images of all divisions together.

Run: dmlkit train start/frozen_lite0 -o runs/grocery --set dataset.root=PHOTOS --set transform.size=160
dmlkit train glyphs/proxy_anchor -o runs/glyphs --set dataset.images_per_class=24
dmlkit embed RUN --split test, for each; python benchmarks/identification.py runs/grocery/embeddings/test
runs/glyphs/embeddings/test. PHOTOS are those of the Grocery Store data set, one folder per product.
"""

import sys
from pathlib import Path

import numpy as np
from report import write_report

from dmlkit.gallery.sources import open_points
from dmlkit.identify.calibration import MOST, SIZES, fit_of, threshold_for
from dmlkit.identify.decisions import labeled_decider
from dmlkit.identify.probability import Strangers, Trials, trials_of
from dmlkit.metrics.reliability import balanced
from dmlkit.vectors.points import PointsInMemory, in_memory

DIVISIONS, ENROLLED, ASKED = 200, 10, 30


def rows_of(codes: np.ndarray, labels: np.ndarray, most: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Return the images of each label in random order, at most ``most``."""
    return [generator.permutation(np.flatnonzero(codes == label))[:most] for label in labels]


def error_of(probabilities: np.ndarray, trials: Trials) -> float:
    """Return the expected calibration error of probabilities."""
    order, weights = np.argsort(probabilities), balanced(np.ones(len(probabilities)), trials.absent)
    bins = np.minimum((weights[order].cumsum() / weights.sum() * 10).astype(int), 9)
    return float(np.abs(np.bincount(bins, (weights * (probabilities - trials.right))[order])).sum() / weights.sum())


def measure(points: PointsInMemory, fpir: float, size: int) -> list[str]:
    names, codes = np.unique(np.array(points.labels), return_inverse=True)
    covered, rates, misses, by_score, errors, pooled = [], [], [], [], [], []
    for division in range(DIVISIONS):
        generator = np.random.default_rng(division)
        labels = generator.permutation(len(names))
        third, half = len(names) // 3, len(names) // 2
        enrolled = rows_of(codes, labels[:third], ENROLLED + ASKED, generator)
        enrolled = [rows for rows in enrolled if len(rows) > 2]
        gallery_rows = [rows[: min(ENROLLED, len(rows) // 2)] for rows in enrolled]
        asked_rows = [rows[min(ENROLLED, len(rows) // 2) :] for rows in enrolled]
        others = [rows_of(codes, part, ASKED, generator) for part in (labels[third:half], labels[half:])]
        gallery = np.concatenate(gallery_rows)
        classes = np.repeat(np.arange(len(gallery_rows)), [len(rows) for rows in gallery_rows])
        text = [str(code) for code in classes]
        part = PointsInMemory(
            "gallery", points.manifold, points.points[gallery], text, [f"{code:05}" for code in classes]
        )
        decider = labeled_decider(part)[1]
        known, new, present = (
            Strangers(
                points.points[np.concatenate(rows)], np.repeat(np.arange(len(rows)), [len(images) for images in rows])
            )
            for rows in (*others, asked_rows)
        )
        calibrated = max(candidate for candidate in SIZES if candidate <= size)
        trials = trials_of(decider, calibrated, MOST, strangers=known)[0]
        fit = fit_of(trials, fpir, "cosine", calibrated)
        new, present = (strangers.together(size, division, len(strangers.classes)) for strangers in (new, present))
        new = Trials.of(decider, new.points, len(gallery_rows) + new.classes, absent=True)
        present = Trials.of(decider, present.points, present.classes, absent=False)
        rate = float((fit.sigmoid.of(new.margins, new.scores) >= fit.threshold).mean())
        assert fit.fpir.interval is not None
        covered.append(fit.fpir.interval[0] <= rate <= fit.fpir.interval[1])
        rates.append(rate)
        misses.append(1 - (present.right & (fit.sigmoid.of(present.margins, present.scores) >= fit.threshold)).mean())
        floor = threshold_for(trials.scores[trials.absent], trials.chosen(trials.absent), fpir)[0]
        by_score.append(1 - (present.right & (present.scores >= floor)).mean())
        test_trials = Trials.joined([present, new])
        probabilities = fit.sigmoid.of(test_trials.margins, test_trials.scores)
        errors.append(error_of(probabilities, test_trials))
        pooled.append((test_trials, probabilities))
    everything = Trials.joined(test_trials for test_trials, _ in pooled)
    error = error_of(np.concatenate([probabilities for _, probabilities in pooled]), everything)
    figures = (np.mean(rates), np.mean(covered), np.mean(misses), np.mean(by_score), np.mean(errors), error)
    return [str(size), f"{fpir:g}", *(f"{value:.3f}" for value in figures)]


def main() -> None:
    rows = [
        [
            Path(name).parent.parent.name if Path(name).parent.name == "embeddings" else Path(name).name,
            *measure(points, fpir, size),
        ]
        for name in sys.argv[1:]
        for points in [in_memory(open_points(Path(name)))]
        for fpir, size in ((0.05, 1), (0.01, 1), (0.05, 2), (0.05, 3), (0.05, 5))
    ]
    write_report(
        "identification",
        __doc__,
        ["embeddings", "images", "target", "FPIR", "covered", "FNIR", "by score", "error", "pooled"],
        rows,
    )


if __name__ == "__main__":
    main()
