"""Identification with matches of patches: how many images of enrolled labels a gallery misses, without and with them.

The model is EfficientNet-Lite0 with ImageNet weights at 160 pixels, `untrained` or that of a run, on photos whose
classes are divided in half; at most 25 images of each test class are drawn. 60 times, 28 of 41 test classes are
enrolled with 10 images each (in general two thirds; half of the images of a class with fewer than 20), their other
images are asked, and the images of the remaining classes are strangers. Matches are those with the 100 nearest images
of the gallery; images beyond them have none. The weight of the matches is that of `dmlkit eval --with local`, chosen on
validation classes.

- `at FPIR 0.05`: FNIR at the threshold that 5 % of the strangers of the test reach.
- `calibrated FNIR`, `calibrated FPIR`: both rates at the threshold that `dmlkit calibrate --fpir 0.05` chooses, on the
  gallery's images without their labels and on strangers of validation classes; it has seen no stranger of the test.
- `rank 1`: share of the asked images whose best guess is right, without a threshold.

All of them use the calibrated probability. Differences are paired, with 95 % intervals over test classes; these are not
of calibrated FPIR, which is of other images.

Run: python benchmarks/local_identification.py PHOTOS RUN. PHOTOS is a folder with one subfolder per product. RUN `full`
was trained by dmlkit train recipes/start/full_lite0.yaml --set dataset.root=PHOTOS --set training.epochs=1 --set
transform.size=160 --set transform.resize=182.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from local import untrained
from report import lowest_reached_by, write_report

from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.embedding.in_memory import Embeddings, embed_images
from dmlkit.embedding.local_features import centered, maps_of, mean_of
from dmlkit.embedding.questions.probability import Trials
from dmlkit.embedding.questions.rates import best_fit
from dmlkit.embedding.trained import TrainedModel, load_model
from dmlkit.evaluation.local import PairOfScores
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.ranking.scored import CANDIDATES, match_patches, patch_matches, score_candidates
from dmlkit.metrics.statistics import paired_comparison
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder

DIVISIONS, ENROLLED, ASKED, FPIR = 60, 10, 15, 0.05


class Images:
    """Cosines and matches of images, and their weight.

    Args:
        cosines: (N, N) float64.
        matches: (N, N) float64.
        codes: (N,) int64, the classes.
        share: weight of the matches.
    """

    def __init__(self, cosines: np.ndarray, matches: np.ndarray, codes: np.ndarray, share: float) -> None:
        self.cosines, self.matches, self.codes, self.share = cosines, matches, codes, share

    def trials(self, rows: np.ndarray, gallery: np.ndarray, *, absent: bool, own: bool = False) -> Trials:
        """Decide on images; ``own`` ones are in the gallery, and are left out, or their whole labels if ``absent``."""
        cosines, matches = self.cosines[np.ix_(rows, gallery)], self.matches[np.ix_(rows, gallery)]
        if own:
            units = self.codes if absent else np.arange(len(self.codes))
            cosines = np.where(units[rows][:, None] == units[gallery], -np.inf, cosines)
        last = np.sort(cosines, axis=1)[:, -min(CANDIDATES, len(gallery))]
        scores = (1 - self.share) * cosines + self.share * np.where(cosines >= last[:, None], matches, 0)
        guesses = self.codes[gallery][scores.argmax(1)]
        others = np.where(self.codes[gallery] == guesses[:, None], -np.inf, scores).max(1)
        best, classes = scores.max(1), self.codes[rows]
        right = np.zeros(len(rows), bool) if absent else guesses == classes
        return Trials(best - others, best, right, np.full(len(rows), absent), classes, guesses)


def drawn(labels: torch.Tensor, most: int) -> torch.Tensor:
    """Return rows of at most so many images of each class, drawn at random."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.cat([order[labels[order] == label][:most] for label in labels.unique()])


def compared(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the matches (N, M) of images with others; some at once, which stay in the cache."""
    parts = second.split(CANDIDATES)
    return torch.stack([torch.cat([match_patches(query.float(), part) for part in parts]) for query in first]).double()


@torch.no_grad()
def measured(name: str, recipe: Recipe, space: Manifold, trained: TrainedModel, fabric: Ranks) -> list[list[str]]:
    """Choose the weight on validation classes, and measure on test classes; return the rows of a model."""
    parts: list[Embeddings] = []
    patches: list[torch.Tensor] = []
    share = 0.0
    for split in ("validation", "test"):
        images = recipe.dataset.build(split)
        found = embed_images(trained, fabric, images, split)
        if split == "test":
            rows = drawn(found.labels, ENROLLED + ASKED)
            found = Embeddings(found.points[rows], found.labels[rows], found.indices[rows], [])
        maps = maps_of(trained, fabric, images, found.indices)
        own = centered(maps, mean_of(maps))
        if split == "validation":
            local = score_candidates(space, (found.points, found.points), patch_matches(own, own))
            share = PairOfScores(found, space, local).choice()[1]
            rows = drawn(found.labels, ASKED)
            found, own = Embeddings(found.points[rows], found.labels[rows], found.indices[rows], []), own[rows]
        parts, patches = [*parts, found], [*patches, own]
    strangers, test = parts
    codes = torch.cat([strangers.labels.max() + 1 + test.labels, strangers.labels]).numpy()
    points = torch.cat([test.points, strangers.points]).double()
    pixels = patches[1].float()
    matches = torch.zeros(len(points), len(points), dtype=torch.float64)
    for start in range(0, len(pixels), CANDIDATES):  # the score is symmetric
        block = slice(start, min(start + CANDIDATES, len(pixels)))
        matches[start : len(pixels), block] = compared(pixels[start:], pixels[block])
        matches[block, start : len(pixels)] = matches[start : len(pixels), block].T
    matches[len(pixels) :, : len(pixels)] = compared(patches[0], pixels)
    cosines = (points @ points.T).numpy()
    names, new = np.unique(codes[: len(pixels)]), np.arange(len(pixels), len(points))
    figures: dict[str, list[torch.Tensor]] = {}
    rates: dict[bool, list[float]] = {False: [], True: []}
    classes: list[np.ndarray] = []
    for division in range(DIVISIONS):
        order = np.random.default_rng(division).permutation(names)
        present = [np.flatnonzero(codes == label) for label in order[: round(len(names) * 28 / 41)]]
        orders = shuffled(present, division)
        counts = [min(ENROLLED, len(rows) // 2) for rows in orders]
        gallery = np.concatenate([rows[:count] for rows, count in zip(orders, counts, strict=True)])
        asked = np.concatenate([rows[count:] for rows, count in zip(orders, counts, strict=True)])
        absent = np.flatnonzero(np.isin(codes, order[len(present) :]))
        classes.append(codes[asked])
        for both in (False, True):
            one = Images(cosines, matches.numpy(), codes, share if both else 0.0)
            known = [one.trials(gallery, gallery, absent=out, own=True) for out in (False, True)]
            fit = best_fit(Trials.all([*known, one.trials(new, gallery, absent=True)]), FPIR)
            tried = one.trials(asked, gallery, absent=False), one.trials(absent, gallery, absent=True)
            said, theirs = (fit.sigmoid.of(trials.margins, trials.scores) for trials in tried)
            for figure, floor in (
                ("at FPIR 0.05", lowest_reached_by(theirs, FPIR)),
                ("calibrated FNIR", fit.threshold),
            ):
                figures.setdefault(f"{figure}/{both}", []).append(torch.from_numpy(~(tried[0].right & (said >= floor))))
            figures.setdefault(f"rank 1/{both}", []).append(torch.from_numpy(tried[0].right))
            rates[both].append(float((theirs >= fit.threshold).mean()))
    rows_of: list[list[str]] = []
    for figure in ("at FPIR 0.05", "calibrated FNIR", "rank 1"):
        sides = [torch.cat(figures[f"{figure}/{both}"]).double() for both in (False, True)]
        change = paired_comparison(sides[0], sides[1], torch.from_numpy(np.concatenate(classes)))
        ends = f"{change.low:+.3f} .. {change.high:+.3f}"
        rows_of.append([name, figure, *(f"{side.mean():.3f}" for side in sides), f"{change.difference:+.3f}", ends])
    means = [float(np.mean(rates[both])) for both in (False, True)]
    rows_of.append([name, "calibrated FPIR", *(f"{mean:.3f}" for mean in means), f"{means[1] - means[0]:+.3f}", ""])
    rows_of.append([name, "share of the matches", "", f"{share:.3f}", "", ""])
    return rows_of


def main(photos: str, run: str) -> None:
    fabric = start_ranks("cpu")
    rows = measured("untrained", *untrained(photos), fabric)
    trained = load_model(RunFolder(Path(run)), fabric)
    rows += measured(Path(run).name, trained.recipe, trained.manifold, trained, fabric)
    header = ["model", "test classes", "cosine", "with matches", "difference", "95 % interval"]
    write_report("local_identification", __doc__, header, rows)


def shuffled(groups: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Return the rows of each class in random order, the same for the same seed."""
    generator = np.random.default_rng(seed)
    return [generator.permutation(rows) for rows in groups]


if __name__ == "__main__":
    main(*sys.argv[1:])
