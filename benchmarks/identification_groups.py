"""Identification by group: how often groups of images of absent labels get a label of a gallery.

Labels that the model was not trained on are divided at random, 100 times, as in benchmarks/identification.py: a third
are enrolled with at most 10 images each, a sixth are strangers for the calibration, and half are strangers for the
test, with at most 30 images each. The images of the test are divided at random into groups of one label, which get one
answer each, as by `dmlkit identify --by-group`. The probability is fitted to groups of the same size, of the gallery's
images and of the strangers for the calibration.

- `target`: the FPIR for which the gallery is calibrated.
- `FPIR`: mean share of the groups of strangers of the test that got a label, at the threshold that was chosen on
  single images; `covered` and `below` are the shares of the divisions in which this rate lies in the stated 95 %
  interval, which is that of single images, and in it or below it.
- `FNIR`: share of the groups of enrolled labels that did not get their own label.
- `own FPIR`, `own covered`, `own FNIR`: the same with a threshold that is chosen on groups of this size, and its
  interval.

Run: python benchmarks/identification_groups.py EMBEDDINGS... These are labeled embeddings of classes that the model
was not trained on, e.g. of dmlkit embed RUN --split test.
"""

import sys
from pathlib import Path

import numpy as np
from identification import ASKED, ENROLLED, rows_of
from report import write_report

from dmlkit.embedding.points import PointsInMemory, in_memory
from dmlkit.embedding.questions.calibration import labeled_decider
from dmlkit.embedding.questions.probability import Trials, tried_together
from dmlkit.embedding.questions.rates import (
    Strangers,
    best_fit,
    fpir_at,
    held_out_probabilities,
    threshold_for,
    trials_on,
)
from dmlkit.embedding.sources import open_points

DIVISIONS, SIZES, FPIR = 100, (1, 3, 5), 0.05


def grouped(points: PointsInMemory, rows: list[np.ndarray], size: int, seed: int) -> Strangers:
    """Return random groups of the images (n,) of each class."""
    codes = np.repeat(np.arange(len(rows)), [len(one) for one in rows])
    return Strangers(points.points[np.concatenate(rows)], codes).together(size, seed)


class Division:
    """Labels that are enrolled, and others, in one division.

    Args:
        points: labeled points.
        seed: number of the division.
    """

    def __init__(self, points: PointsInMemory, seed: int) -> None:
        self.points, self.seed = points, seed
        names, codes = np.unique(np.array(points.labels), return_inverse=True)
        generator = np.random.default_rng(seed)
        labels = generator.permutation(len(names))
        third, half = len(names) // 3, len(names) // 2
        enrolled = [rows for rows in rows_of(codes, labels[:third], ENROLLED + ASKED, generator) if len(rows) > 2]
        counts = [min(ENROLLED, len(rows) // 2) for rows in enrolled]
        self.asked = [rows[count:] for rows, count in zip(enrolled, counts, strict=True)]
        self.known, self.new = (rows_of(codes, part, ASKED, generator) for part in (labels[third:half], labels[half:]))
        own = [f"{code:05}" for code, count in enumerate(counts) for _ in range(count)]
        rows = np.concatenate([rows[:count] for rows, count in zip(enrolled, counts, strict=True)])
        part = PointsInMemory("gallery", points.manifold, points.points[rows], own, own)
        self.decider = labeled_decider(part)[1]
        self.is_trained = np.zeros(len(counts), bool)

    def trials(self, size: int) -> Trials:
        """Return decisions of which the calibration knows the answer."""
        strangers = grouped(self.points, self.known, 1, 0)
        return Trials.all(
            trials_on(part, self.is_trained, strangers.together(size, seed))[0]
            for seed, part in tried_together(self.decider, size)
        )

    def rates(self) -> list[list[float]]:
        """Return the figures of this division for each size, without the target."""
        found: list[list[float]] = []
        single = self.trials(1)
        fit = best_fit(single, FPIR)
        by_score = fit.sigmoid.margin_slope == 0
        stated = fpir_at(fit.threshold, fit.held_out[single.absent], single.classes[single.absent], FPIR).interval
        for size in SIZES:
            trials = single if size == 1 else self.trials(size)
            held_out, sigmoid = held_out_probabilities(trials, by_score=by_score), trials.fit(by_score=by_score)
            own = threshold_for(held_out[trials.absent], FPIR)
            theirs = fpir_at(own, held_out[trials.absent], trials.classes[trials.absent], FPIR).interval
            new, asked = (grouped(self.points, rows, size, self.seed) for rows in (self.new, self.asked))
            strangers = Trials.of(self.decider, new.points, len(self.asked) + new.classes, absent=True)
            present = Trials.of(self.decider, asked.points, asked.classes, absent=False)
            said, right = (sigmoid.of(one.margins, one.scores) for one in (strangers, present))
            figures: list[float] = []
            for threshold, ends in ((fit.threshold, stated), (own, theirs)):
                assert ends is not None
                rate = float((said >= threshold).mean())
                missed = 1 - float((present.right & (right >= threshold)).mean())
                figures += [rate, float(ends[0] <= rate <= ends[1]), float(rate <= ends[1]), missed]
            found.append(figures)
        return found


def measure(points: PointsInMemory) -> list[list[str]]:
    means = np.mean([Division(points, seed).rates() for seed in range(DIVISIONS)], axis=0)
    return [
        [str(size), f"{FPIR:g}", *(f"{value:.3f}" for value in figures)]
        for size, figures in zip(SIZES, means, strict=True)
    ]


def main() -> None:
    rows = [
        [Path(name).parent.parent.name, *row]
        for name in sys.argv[1:]
        for row in measure(in_memory(open_points(Path(name))))
    ]
    header = ["embeddings", "images", "target", "FPIR", "covered", "below", "FNIR"]
    header += ["own FPIR", "own covered", "own below", "own FNIR"]
    write_report("identification_groups", __doc__, header, rows)


if __name__ == "__main__":
    main()
