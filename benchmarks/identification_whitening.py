"""Whitened embeddings: how many images of enrolled labels a gallery misses, and how many strangers get a label.

The protocol is that of identification_features.py: at most 40 images of each class are drawn; 60 times, 28 of 41 test
classes are enrolled with 10 images each (in general two thirds; half of the images of a class with fewer than 20), at
most 30 others are asked, and the images of the remaining classes are strangers. The probability is a logistic
regression on the similarity of the nearest image and its lead over the best other label, fitted to the gallery's
images, once without themselves and once without their labels, and to strangers of validation classes.

Points are whitened by the covariance of images within classes, shrunk toward a multiple of the identity (Ledoit & Wolf
2004), as in speaker verification (Hatch et al. 2006), and scaled to unit vectors again. No test stranger is part of it.

- `none`: the cosine of the embeddings as they are, with which the others are compared.
- `training classes`: the covariance within training and validation classes.
- `gallery`: within the labels of the gallery and validation classes. The images of a label are tried in a space that
  was whitened by the labels of other folds, of 5, because strangers have no images in the covariance either.
- `gallery, same space`: the same, but they are tried in the space that they whiten.
- `same space, not centered`: the same, without the mean of all points subtracted first.
- `rank 1`: share of the asked images whose guess is right. `FNIR`: at the threshold that 5 % of the strangers reach,
  with its standard deviation over the draws, and the paired difference from `none` with its 95 % interval over classes.
- `calibrated`: FNIR and FPIR at the threshold chosen for FPIR 0.05 on the images of the fit, with the same difference.

The variant `gallery` was chosen on the test classes of `frozen`. On Caltech 101 and the glyphs, seen later, its FNIR
is no lower, so that no command whitens.

Run: python benchmarks/identification_whitening.py RUN... `frozen` was trained by dmlkit train start/frozen_lite0
--set dataset.root=PHOTOS --set transform.size=160: a head on EfficientNet-Lite0. `full` was trained by dmlkit train
recipes/start/full_lite0.yaml --set dataset.root=PHOTOS --set training.epochs=1 --set transform.size=160 --set
transform.resize=182: the whole network. `caltech` is as `frozen`, of Caltech 101 with transform.resize=182; `glyphs`
was trained by dmlkit train glyphs/proxy_anchor.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from identification_features import ASKED, DIVISIONS, ENROLLED, FPIR, SPLITS, Draw, Logistic
from local_identification import drawn
from report import lowest_reached_by, write_report
from sklearn.covariance import ledoit_wolf_shrinkage

from dmlkit.distributed.launch import start_ranks
from dmlkit.embedding.stored import split_embeddings
from dmlkit.embedding.trained import load_model
from dmlkit.metrics.statistics import paired_comparison
from dmlkit.run_folder.folder import RunFolder

FOLDS = 5
Map = Callable[[np.ndarray], np.ndarray]
"""Function of points (N, D), which returns unit vectors (N, D)."""


def whitening(points: np.ndarray, codes: np.ndarray, *, centered: bool = True) -> Map:
    """Return the map that whitens by the covariance of points (N, D) within their codes (N,), and may center them."""
    classes = np.unique(codes, return_inverse=True)[1]
    means = np.stack([points[classes == code].mean(axis=0) for code in range(classes.max() + 1)])
    within, center = points - means[classes], means.mean(axis=0)
    shrinkage, freedom = ledoit_wolf_shrinkage(within, assume_centered=True), len(points) - len(means)
    floor = shrinkage * np.square(within).sum() / freedom / points.shape[1]
    values, vectors = np.linalg.eigh(within @ within.T / freedom)  # N is often below D
    some = values > 1e-6 * values[-1]
    axes = within.T @ (vectors[:, some] / np.sqrt(values[some] * freedom))
    gains = np.sqrt(floor / ((1 - shrinkage) * values[some] + floor)) - 1

    def whiten(rows: np.ndarray) -> np.ndarray:
        moved = rows - center if centered else rows
        moved = moved + (moved @ axes * gains) @ axes.T
        return moved / np.linalg.norm(moved, axis=1, keepdims=True)

    return whiten


def decided(
    points: np.ndarray, gallery: np.ndarray, codes: np.ndarray, left: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return features (Q, 2) and guesses (Q,) in a gallery (N, D), sorted by codes; ``left`` (Q, N) are left out."""
    similarity = np.where(left, -np.inf, points @ gallery.T)
    nearest = np.maximum.reduceat(similarity, np.flatnonzero(np.diff(codes, prepend=-1)), axis=1)
    two = np.sort(nearest, axis=1)[:, -2:]
    return np.stack([two[:, 1], two[:, 1] - two[:, 0]], axis=1), nearest.argmax(axis=1)


class Measured:
    """Misses over all draws, with each whitening.

    Args:
        points: unit vectors of test, validation and training images.
        labels: their classes.
    """

    def __init__(self, points: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> None:
        self.points, self.labels = points, labels
        self.classes: list[np.ndarray] = []
        self.found: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray, float]]] = {}
        known = [np.concatenate([source["train"], source["validation"]]) for source in (points, labels)]
        known[1][len(labels["train"]) :] += known[1].max() + 1
        trained = whitening(known[0], known[1])
        for division in range(DIVISIONS):
            draw = Draw.of(labels["test"], division)
            self.classes.append(labels["test"][draw.asked])
            own = self._by_gallery(draw, np.ones(len(draw.codes), bool))
            fold = np.random.default_rng(0).permutation(draw.codes.max() + 1)[draw.codes] % FOLDS
            others = [(fold == number, self._by_gallery(draw, fold != number)) for number in range(FOLDS)]
            everything = np.ones(len(draw.codes), bool)
            self._measure("none", draw, lambda rows: rows, [(everything, lambda rows: rows)])
            self._measure("training classes", draw, trained, [(everything, trained)])
            self._measure("gallery", draw, own, others)
            self._measure("gallery, same space", draw, own, [(everything, own)])
            own = self._by_gallery(draw, everything, centered=False)
            self._measure("same space, not centered", draw, own, [(everything, own)])

    def _by_gallery(self, draw: Draw, used: np.ndarray, *, centered: bool = True) -> Map:
        """Whiten by some images of the gallery, (N,) bool, and those of validation."""
        points = np.concatenate([self.points["test"][draw.gallery[used]], self.points["validation"]])
        strangers = draw.codes.max() + 1 + self.labels["validation"]
        return whitening(points, np.concatenate([draw.codes[used], strangers]), centered=centered)

    def _measure(self, name: str, draw: Draw, own: Map, tried: list[tuple[np.ndarray, Map]]) -> None:
        """Fit to images of the gallery, each in its own space, and to strangers of validation; measure the others."""
        test, (size, codes) = self.points["test"], (len(draw.gallery), draw.codes)
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # features, whether right, whether absent
        for rows, whiten in tried:
            gallery = whiten(test[draw.gallery])
            own_codes = codes[rows]
            for left, absent in ((np.eye(size, dtype=bool)[rows], False), (own_codes[:, None] == codes, True)):
                features, guesses = decided(gallery[rows], gallery, codes, left)
                parts.append((features, (guesses == own_codes) & (not absent), np.full(len(features), absent)))
        gallery, nothing = own(test[draw.gallery]), np.zeros((1, size), bool)
        strangers = decided(own(self.points["validation"]), gallery, codes, nothing)[0]
        parts.append((strangers, np.zeros(len(strangers), bool), np.ones(len(strangers), bool)))
        features, is_right, is_absent = (np.concatenate(column) for column in zip(*parts, strict=True))
        fit = Logistic(features, is_right, is_absent)
        asked, guesses = decided(own(test[draw.asked]), gallery, codes, nothing)
        new = fit(decided(own(test[draw.strangers]), gallery, codes, nothing)[0])
        said, right, chosen = fit(asked), guesses == draw.answers, lowest_reached_by(fit(features[is_absent]), FPIR)
        missed, calibrated = (~(right & (said >= floor)) for floor in (lowest_reached_by(new, FPIR), chosen))
        self.found.setdefault(name, []).append((right, missed, calibrated, float((new >= chosen).mean())))

    def rows(self) -> list[list[str]]:
        """Return a row of the table per whitening."""
        classes = torch.from_numpy(np.unique(np.concatenate(self.classes), return_inverse=True)[1])
        rows: list[list[str]] = []
        bases: list[torch.Tensor] = []
        for name, draws in self.found.items():
            right, *misses = (np.concatenate([draw[place] for draw in draws]) for place in range(3))
            spread = np.std([draw[1].mean() for draw in draws], ddof=1)
            cells: list[str] = []
            for place, missed in enumerate(torch.from_numpy(one).double() for one in misses):
                bases = [*bases, missed] if name == "none" else bases
                change = paired_comparison(bases[place], missed, classes)
                ends = f"{change.difference:+.3f} ({change.low:+.3f} .. {change.high:+.3f})"
                value = f"{missed.mean():.3f} (sd {spread:.3f})" if place == 0 else f"{missed.mean():.3f}"
                cells += [value, "" if name == "none" else ends]
            fpir = np.mean([draw[3] for draw in draws])
            rows.append([name, f"{right.mean():.3f}", *cells, f"{fpir:.3f}"])
        return rows


@torch.no_grad()
def measured(run: Path) -> Measured:
    """Read or compute the embeddings of a run, and measure."""
    fabric = start_ranks("cpu")
    trained = load_model(RunFolder(run), fabric)
    points: dict[str, np.ndarray] = {}
    labels: dict[str, np.ndarray] = {}
    for split in SPLITS:
        images = trained.recipe.dataset.build(split)
        found = split_embeddings(RunFolder(run), trained, fabric, images, split)
        rows = drawn(found.labels, ENROLLED + ASKED).sort().values
        points[split], labels[split] = found.points[rows].numpy(), found.labels[rows].numpy()
    return Measured(points, labels)


def main(runs: list[Path]) -> None:
    torch.set_num_threads(1)
    rows = [[run.name, *row] for run in runs for row in measured(run).rows()]
    header = ["run", "whitened by", "rank 1", "FNIR", "difference", "calibrated FNIR", "difference", "FPIR"]
    write_report("identification_whitening", __doc__, header, rows)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
