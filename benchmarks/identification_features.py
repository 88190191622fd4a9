"""Features of the probability of identify: how many images of enrolled labels a gallery misses with each of them.

`trained` is a run of recipes/start/full_lite0.yaml (EfficientNet-Lite0) after one epoch at 160 pixels on photos whose
classes are divided in half; `untrained` is the cosine of the features of the same network with its ImageNet weights;
`both` is the mean of the two cosines. At most 40 images of each class are drawn. 60 times, 28 of 41 test classes are
enrolled with 10 images each (in general two thirds; half of the images of a class with fewer than 20), at most 30
others are asked, and the images of the remaining classes are strangers.

The probability is a logistic regression on the features, whose slopes are not negative, fitted as by `dmlkit
calibrate`: to the gallery's images, once without themselves and once without their labels, and to strangers of
validation classes.

- `score` is the similarity of the nearest image, `margin` its lead over the best other label; `score + margin` is
  their plain sum. `score, margin` are those of `identify`, with which the others are compared.
- `agreement` is the share of the 5 nearest images with the guessed label; `class mean` the mean similarity of that
  label's images and its lead; `AS-norm` the score in standard deviations from the 50 most similar training images of
  both images (Matejka et al. 2017).
- `guess by nearest and mean`: the label with the highest sum of nearest and mean similarity, with the features of
  identify.
- `rank 1`: share of the asked images whose guess is right. `FNIR`: at the threshold that 5 % of the strangers reach,
  with the paired difference from `score, margin` and its 95 % interval over classes. `calibrated`: FNIR and FPIR at
  the threshold chosen for FPIR 0.05 on the images of the fit.

Run: python benchmarks/identification_features.py RUN. The run was trained by dmlkit train recipes/start/full_lite0.yaml
--set dataset.root=PHOTOS --set training.epochs=1 --set transform.size=160 --set transform.resize=182.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from local_identification import drawn
from report import lowest_reached_by, write_report

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import start_ranks
from dmlkit.embedding.in_memory import embed_dataset
from dmlkit.embedding.trained import load_model
from dmlkit.evaluation.untouched import untouched_model
from dmlkit.metrics.statistics import paired_comparison
from dmlkit.model import build_model
from dmlkit.run_folder.folder import RunFolder

DIVISIONS, ENROLLED, ASKED, FPIR, NEAREST, COHORT = 60, 10, 30, 0.05, 5, 50
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
COLUMNS = ("score", "margin", "agreement", "mean", "mean margin", "AS-norm")
SETS: dict[str, tuple[int, ...]] = {
    "score, margin": (0, 1),
    "score": (0,),
    "margin": (1,),
    "score + margin": (),  # without a fit
    "AS-norm": (5,),
    "class mean": (3, 4),
    "score, margin, agreement": (0, 1, 2),
    "score, margin, class mean": (0, 1, 3, 4),
    "score, margin, AS-norm": (0, 1, 5),
    "all": (0, 1, 2, 3, 4, 5),
}
BY_MEAN = "guess by nearest and mean"


class Asked(NamedTuple):
    """Features and guesses of images in a gallery."""

    features: np.ndarray  # (Q, F)
    guesses: np.ndarray  # (Q,)


def describe(
    points: np.ndarray, gallery: np.ndarray, codes: np.ndarray, cohort: np.ndarray, left: np.ndarray, *, by_mean: bool
) -> Asked:
    """Compute the features of images (Q, D) in a gallery (N, D) with codes (N,); ``left`` (Q, N) bool are left out."""
    similarity = np.where(left, np.nan, points @ gallery.T)
    labels, rows = codes.max() + 1, np.arange(len(points))
    nearest, mean = np.full((len(points), labels), -np.inf), np.full((len(points), labels), -np.inf)
    for label in range(labels):
        part = similarity[:, codes == label]
        some = ~np.isnan(part).all(axis=1)
        nearest[some, label], mean[some, label] = np.nanmax(part[some], axis=1), np.nanmean(part[some], axis=1)
    guesses = (nearest + mean if by_mean else nearest).argmax(axis=1)
    found: dict[str, np.ndarray] = {}
    for name, values in (("score", nearest), ("mean", mean)):
        others = values.copy()
        others[rows, guesses] = -np.inf
        found[name] = values[rows, guesses]
        found["margin" if name == "score" else "mean margin"] = values[rows, guesses] - others.max(axis=1)
    known = np.where(np.isnan(similarity), -np.inf, similarity)
    first = np.argsort(-known, axis=1)[:, :NEAREST]
    found["agreement"] = (codes[first] == guesses[:, None]).mean(axis=1)
    match = np.where(codes[None] == guesses[:, None], known, -np.inf).argmax(axis=1)
    norms: list[np.ndarray] = []
    for side in (points, gallery[match]):
        best = -np.sort(-(side @ cohort.T), axis=1)[:, :COHORT]
        norms.append((found["score"] - best.mean(axis=1)) / best.std(axis=1))
    found["AS-norm"] = (norms[0] + norms[1]) / 2
    return Asked(np.stack([found[name] for name in COLUMNS], axis=1), guesses)


class Draw(NamedTuple):
    """Images of one draw: rows of the test images, with codes of their labels."""

    gallery: np.ndarray  # (N,)
    codes: np.ndarray  # (N,)
    asked: np.ndarray  # (Q,)
    answers: np.ndarray  # (Q,)
    strangers: np.ndarray  # (S,)

    @classmethod
    def of(cls, labels: np.ndarray, seed: int) -> "Draw":
        """Enroll two thirds of the classes of images with these labels (N,)."""
        generator, names = np.random.default_rng(seed), np.unique(labels)
        order = generator.permutation(names)
        count = round(len(names) * 28 / 41)
        rows = [generator.permutation(np.flatnonzero(labels == name)) for name in order[:count]]
        kept = [min(ENROLLED, len(one) // 2) for one in rows]
        later = [one[size : size + ASKED] for one, size in zip(rows, kept, strict=True)]
        return cls(
            np.concatenate([one[:size] for one, size in zip(rows, kept, strict=True)]),
            np.repeat(np.arange(count), kept),
            np.concatenate(later),
            np.repeat(np.arange(count), [len(one) for one in later]),
            np.flatnonzero(np.isin(labels, order[count:])),
        )


class Logistic:
    """Logistic regression with Platt's targets, slopes of at least 0, and both kinds of images with the same weight."""

    def __init__(self, features: np.ndarray, right: np.ndarray, absent: np.ndarray) -> None:
        from scipy.optimize import minimize
        from scipy.special import expit

        weights = np.where(absent, 0.5 / absent.mean(), 0.5 / (~absent).mean())
        self.center, self.scale = features.mean(axis=0), features.std(axis=0) + 1e-9
        scaled, counts = (features - self.center) / self.scale, (right.sum(), (~right).sum())
        targets = np.where(right, (counts[0] + 1) / (counts[0] + 2), 1 / (counts[1] + 2))

        def loss(slopes: np.ndarray) -> tuple[float, np.ndarray]:
            logits = scaled @ slopes[:-1] + slopes[-1]
            excess = weights * (expit(logits) - targets)
            value = weights @ (np.logaddexp(0, logits) - targets * logits)
            return float(value), np.append(excess @ scaled, excess.sum())

        bounds = [(0, None)] * features.shape[1] + [(None, None)]
        start = np.zeros(features.shape[1] + 1)
        self.slopes = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Return the log odds (Q,)."""
        return (features - self.center) / self.scale @ self.slopes[:-1] + self.slopes[-1]


class Measured:
    """Misses of each set of features over all draws.

    Args:
        points: unit vectors of test, validation and training images.
        labels: their classes.
    """

    def __init__(self, points: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> None:
        self.points, self.labels = points, labels
        self.classes: list[np.ndarray] = []
        self.missed: dict[str, list[np.ndarray]] = {}
        self.right: dict[str, list[np.ndarray]] = {}
        self.calibrated: dict[str, list[tuple[float, float]]] = {}
        for division in range(DIVISIONS):
            draw = Draw.of(labels["test"], division)
            self.classes.append(labels["test"][draw.asked])
            for by_mean in (False, True):
                self._measure(draw, by_mean=by_mean)

    def _measure(self, draw: Draw, *, by_mean: bool) -> None:
        gallery, codes, asked, answers, absent = draw
        test, nothing = self.points["test"], np.zeros((1, len(gallery)), bool)

        def of(points: np.ndarray, left: np.ndarray) -> Asked:
            return describe(points, test[gallery], codes, self.points["train"], left, by_mean=by_mean)

        present = of(test[gallery], np.eye(len(gallery), dtype=bool))
        without = of(test[gallery], codes[:, None] == codes)
        strangers = of(self.points["validation"], nothing)
        fitted = np.concatenate([present.features, without.features, strangers.features])
        is_absent = np.arange(len(fitted)) >= len(gallery)
        is_right = np.append(present.guesses == codes, np.zeros(is_absent.sum(), bool))
        new, others = of(test[asked], nothing), of(test[absent], nothing)
        right = new.guesses == answers
        for name, columns in {BY_MEAN: (0, 1)}.items() if by_mean else SETS.items():
            logits = Logistic(fitted[:, columns], is_right, is_absent) if columns else None
            said = [
                one[:, :2].sum(axis=1) if logits is None else logits(one[:, columns])
                for one in (fitted[is_absent], new.features, others.features)
            ]
            chosen = lowest_reached_by(said[0], FPIR)
            missed = ~(right & (said[1] >= lowest_reached_by(said[2], FPIR)))
            self.missed.setdefault(name, []).append(missed)
            self.right.setdefault(name, []).append(right)
            rates = float(1 - (right & (said[1] >= chosen)).mean()), float((said[2] >= chosen).mean())
            self.calibrated.setdefault(name, []).append(rates)

    def rows(self, model: str) -> list[list[str]]:
        """Return a row of the table per set of features."""
        found: list[list[str]] = []
        classes = torch.from_numpy(np.unique(np.concatenate(self.classes), return_inverse=True)[1])
        values = {name: torch.from_numpy(np.concatenate(parts)).double() for name, parts in self.missed.items()}
        for name, missed in values.items():
            change = paired_comparison(values["score, margin"], missed, classes)
            ends = (
                "" if name == "score, margin" else f"{change.difference:+.3f} ({change.low:+.3f} .. {change.high:+.3f})"
            )
            fnir, fpir = np.mean(self.calibrated[name], axis=0)
            rank = np.concatenate(self.right[name]).mean()
            found.append([model, name, f"{rank:.3f}", f"{missed.mean():.3f}", ends, f"{fnir:.3f}", f"{fpir:.3f}"])
        return found


def main(run: Path) -> None:
    torch.set_num_threads(1)
    fabric, trained = start_ranks("cpu"), load_model(RunFolder(run), start_ranks("cpu"))
    alone = untouched_model(build_model(trained.recipe).eval())
    points: dict[str, dict[str, np.ndarray]] = {"trained": {}, "untrained": {}, "both": {}}
    labels: dict[str, np.ndarray] = {}
    for split in SPLITS:
        images = trained.recipe.dataset.build(split)
        rows = drawn(images.labels, ENROLLED + ASKED).sort().values.tolist()
        for name, model in (("trained", trained.model), ("untrained", alone)):
            found = embed_dataset(fabric, model, images, trained.recipe.transform, indices=rows, workers=0)
            points[name][split], labels[split] = found.points.numpy(), found.labels.numpy()
        joined = np.concatenate([points["trained"][split], points["untrained"][split]], axis=1)
        points["both"][split] = joined / 2**0.5
    rows = [row for name, vectors in points.items() for row in Measured(vectors, labels).rows(name)]
    header = ["model", "features", "rank 1", "FNIR", "difference, 95 % interval", "calibrated FNIR", "FPIR"]
    write_report("identification_features", __doc__, header, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
