"""Calibration: the similarity from which on two images count as the same class, and the probability that they are.

The threshold is chosen on all pairs of validation images for a requested false accept rate, and reported with a
bootstrap interval and its rates on test classes. The probability is a logistic function of the similarity (Platt 1999).
It holds if every second pair is of the same class: such pairs are rare among all pairs, so that the share to expect
depends on where the pairs come from, and `probability_at` takes it. Reliability diagrams show the share of answers that
are right over their probability.
"""

from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_writable
from dmlkit.files.pictures import COLORS, COLUMN, picture
from dmlkit.files.where import Where
from dmlkit.identify.answers import Sigmoid
from dmlkit.identify.probability import Trials
from dmlkit.loading.inputs import refuse_faults
from dmlkit.metrics.base import Points
from dmlkit.metrics.pairing import Pairing
from dmlkit.metrics.reliability import Reliability
from dmlkit.metrics.statistics import LEAST_CLASSES, effective_number, tail_of
from dmlkit.metrics.verification import lowest_share
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import PairProbability, PairRates, Threshold
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import TrainedModel, load_model

LEAST_ACCEPTED = 10  # pairs: the relative error of a rate from fewer accepted pairs is above a third
MARGIN = 10  # times as many of the best pairs are kept, because other classes may accept more at the same threshold
MOST_KEPT = 2**22  # pairs, 84 MB; more only if the rate itself needs more
RESAMPLES = 1000
USUAL_FAR = 1e-3
"""Requested false accept rate, if none is given and the pairs allow it."""
WEIGHTED = 2**14  # pairs that a resample weights; if there are more, every second, third ... represents its neighbors


@torch.no_grad()  # the curvature of a manifold may be learned
def calibrate_run(
    path: Path,
    *,
    far: float | None = None,
    checkpoint: CheckpointName | None = None,
    overrides: Sequence[str] = (),
    where: Where | None = None,
    ranks: Ranks | None = None,
    bar: Bar = no_bar,
) -> Threshold:
    """Choose the similarity threshold of a run, and fit the probability of pairs; write both into the run.

    Both use pairs of validation images, on which the model was not trained; see `calibrate_pairs` and
    `fit_pair_probability`. The rates of the threshold are also measured on the test images.

    Args:
        far: the share of the pairs of different classes that may be accepted as the same class. Default: 0.001, or the
            lowest share that the pairs allow.
        overrides: ``key=value`` each, of the run's dataset, which may have moved.
        where: conditions on the rows of its table, of which alone it is chosen.
    """
    if far is not None and not 0 < far < 1:
        raise UserError(f"--far {far:g}: expected a share between 0 and 1, e.g. 1e-3")
    run, ranks = RunFolder(path), ranks or start_ranks("auto")
    trained = load_model(run, ranks, checkpoint, overrides=overrides).limited(where)
    check_writable(run.threshold_path.parent)
    threshold = threshold_on(points_of_split(run, trained, "validation", ranks, bar), run, trained, far)
    test = Pairing.of(points_of_split(run, trained, "test", ranks, bar))
    rates, text = rates_at(test, threshold.threshold), where and where.text
    threshold = threshold.model_copy(update={"test": rates, "where": text})
    if ranks.is_global_zero:
        threshold.write(run.threshold_path)
    return threshold


def threshold_on(validation: Points, run: RunFolder, trained: TrainedModel, far: float | None) -> Threshold:
    """Choose the threshold and the probability on points of validation images."""
    name = validation.manifold.similarity_name
    return threshold_of_pairs(Pairing.of(validation), name, lambda: fit_pair_probability(validation), run, trained, far)


def threshold_of_pairs(
    pairing: Pairing,
    similarity: str,
    fit: Callable[[], PairProbability],
    run: RunFolder,
    trained: TrainedModel,
    far: float | None,
) -> Threshold:
    """Choose the threshold on pairs of validation images, whose probability is fitted then; see `threshold_on`."""
    if far is None:
        far = max(USUAL_FAR, lowest_share(LEAST_ACCEPTED, pairing.different))
    try:
        calibration = calibrate_pairs(pairing, far)
    except ValueError as error:
        raise UserError(f"cannot calibrate {run.path} on its validation classes: {error}") from error
    return Threshold(
        weights=trained.fingerprint,
        checkpoint=trained.checkpoint,
        similarity=similarity,
        threshold=calibration.threshold,
        far=far,
        far_interval=calibration.interval,
        validation=calibration.rates,
        test=None,
        probability=fit(),
    )


def points_of_split(run: RunFolder, trained: TrainedModel, split: Split, ranks: Ranks, bar: Bar) -> Points:
    """Return the points and labels of a split, see `split_embeddings`."""
    config = trained.recipe.dataset
    config.require_one_label(str(run.path))
    config.require_unseen(str(run.path))
    dataset = config.build(split)
    embeddings = split_embeddings(run, trained, ranks, dataset, split, bar=bar)
    refuse_faults(embeddings.faults, config.on_bad_image)
    labels = embeddings.labels.unique(return_inverse=True)[1]
    device = trained.device
    groups = dataset.groups_of(embeddings.indices)
    return Points(embeddings.points.to(device), labels.to(device), trained.manifold, groups=groups)


class Calibration(NamedTuple):
    """Chosen threshold and its error rates."""

    threshold: float  # the lowest float32 that at most the share of the pairs of different classes reaches
    interval: tuple[float, float] | None  # 95 %, of the rate on as many other classes; None for few classes
    rates: PairRates  # on the classes on which it was chosen


def calibrate_pairs(pairing: Pairing, far: float, *, seed: int = 0) -> Calibration:
    """Choose a threshold on all pairs of points."""
    different = pairing.different
    if pairing.same == 0:
        raise ValueError(
            "no class has two images, of different groups if there are any, so the false reject rate cannot be "
            "measured; use classes with at least two"
        )
    if far * different < LEAST_ACCEPTED:
        pairs = LEAST_ACCEPTED / far
        needed = f"{pairs:,.0f}" if pairs < 1e12 else f"{pairs:.2g}"  # so many are of a million images
        lowest = lowest_share(LEAST_ACCEPTED, different)
        advice = f"use --far {lowest:g} or more, or validate" if lowest < 1 else "validate"
        raise ValueError(
            f"{different:,} pairs of different classes are too few for a false accept rate of {far:g}: at least "
            f"{needed} are needed, that is {LEAST_ACCEPTED} / {far:g}; {advice} on more images"
        )
    accepted = int(far * different)
    accepted += (accepted + 1) / different <= far  # 0.29 * 100 is 28.999999999999996
    scores, classes = best_pairs(pairing, min(different, max(accepted + 1, min(MARGIN * accepted, MOST_KEPT))))
    threshold = float(torch.nextafter(scores[accepted].cpu(), torch.tensor(torch.inf)))
    sizes = pairing.row_labels.bincount().double()
    interval = far_interval(classes, sizes, far, different, seed=seed) if len(sizes) >= LEAST_CLASSES else None
    return Calibration(threshold, interval, rates_at(pairing, threshold))


def least_far(classes: int) -> tuple[int, float]:
    """Return the number of pairs of classes, and the least false accept rate that they can show, rounded up.

    Images of two classes that look alike are accepted together, so that a lower rate rests on some images of one pair
    of classes, and says little about others.

    Example:
        >>> least_far(4), least_far(2)
        ((6, 0.17), (1, 1.0))
    """
    pairs = classes * (classes - 1) // 2
    return pairs, lowest_share(1, pairs)


def rates_at(pairing: Pairing, threshold: float) -> PairRates:
    """Count the error rates of a threshold over all pairs."""
    accepted = list[int]()  # of each block
    pairing.each_block(lambda scores, _rows, _columns: accepted.append(int((scores >= threshold).sum())))
    rejected = sum(int((scores < threshold).sum()) for scores in pairing.same_scores())
    return PairRates(
        classes=len(pairing.row_labels.unique()),
        images=len(pairing.rows),
        same=pairing.same,
        different=pairing.different,
        far=sum(accepted) / max(1, pairing.different),
        frr=rejected / max(1, pairing.same),
    )


def best_pairs(pairing: Pairing, count: int) -> tuple[Tensor, Tensor]:
    """Find the scores (K,) float32, descending, and labels (2, K) of the best pairs of different classes.

    At most twice as many are in memory at once.
    """
    device = pairing.rows.device
    scores, classes, lock = torch.empty(0, device=device), torch.empty(2, 0, dtype=torch.int64, device=device), Lock()
    floor = -torch.inf

    def use(block: Tensor, rows: slice, columns: slice) -> None:
        nonlocal scores, classes, floor
        is_candidate = (block >= floor) & (block > -torch.inf)
        row, column = is_candidate.nonzero(as_tuple=True)
        pair_classes = torch.stack([pairing.row_labels[rows][row], pairing.column_labels[columns][column]])
        with lock:
            scores, classes = torch.cat([scores, block[is_candidate]]), torch.cat([classes, pair_classes], 1)
            if len(scores) > count:
                scores, best = scores.topk(count)
                classes, floor = classes[:, best], float(scores[-1])

    pairing.each_block(use)
    order = scores.argsort(descending=True)[:count]
    return scores[order], classes[:, order]


def far_interval(best: Tensor, sizes: Tensor, far: float, different: int, *, seed: int) -> tuple[float, float]:
    """Estimate a 95 % interval of the false accept rate on as many other classes, for a threshold chosen on these.

    Pairs that share a class are not independent, so classes are drawn: twice as many as there are, with replacement.
    A threshold is chosen on the first half of the draw, and its rate is measured on the second half, 1 000 times;
    copies of a class make no pairs with each other. The interval thus includes the variation of the choice and of the
    other classes. If few classes have most of the accepted pairs, it is wider than the percentiles, see `tail_of`.

    Args:
        best: (2, K) classes of the best pairs of C classes, enough to exceed the share ``far``.
        sizes: (C,) float64, number of images of each class.
        different: number of pairs of different classes.
    """
    step = -(-best.shape[1] // WEIGHTED)
    first, second = best[:, step // 2 :: step].cpu()
    sizes, generator = sizes.cpu(), torch.Generator().manual_seed(seed)
    paired = different / float(sizes.sum().square() - sizes.square().sum())  # 1/2 if all pairs of classes count
    rates = torch.empty(RESAMPLES, dtype=torch.float64)
    for resample in range(RESAMPLES):
        accepted: list[Tensor] = []
        for _ in range(2):
            images = _draw(sizes, generator)
            pairs = (images.sum().square() - images.square().sum()) * paired
            weights = images / sizes
            accepted.append(step * (weights[first] * weights[second]).cumsum(0) / pairs)
        chosen = int((accepted[0] <= far).sum())
        rates[resample] = accepted[1][chosen - 1] if chosen else 0.0
    accepted_classes = best[:, : max(1, round(far * different))].flatten().bincount()
    tail = tail_of(effective_number(accepted_classes.double()))
    low, high = rates.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).clamp(0, 1).tolist()
    return low, high


def _draw(sizes: Tensor, generator: torch.Generator) -> Tensor:
    """Draw C classes with replacement, at least two different ones; return the number of images of each, (C,)."""
    while True:
        times = torch.randint(len(sizes), (len(sizes),), generator=generator).bincount(minlength=len(sizes))
        if int((times > 0).sum()) > 1:
            return times * sizes


def plot_reliability(reliability: Reliability, output: Path, *, title: str, share: str) -> Path:
    """Draw the bins of probabilities with their intervals, and the diagonal on which calibrated ones lie.

    ``share`` is the label of the vertical axis: what is counted.
    """
    probabilities, right = ([getattr(bin_, name) for bin_ in reliability.bins] for name in ("probability", "share"))
    ends = [bin_.interval or (bin_.share, bin_.share) for bin_ in reliability.bins]
    below = [max(0.0, value - low) for value, (low, _) in zip(right, ends, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(right, ends, strict=True)]
    with picture(output, COLUMN + 18) as figure:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=0.8, label="calibrated")
        label = "tenth of the answers" + ("" if reliability.error_interval is None else ", 95 % interval over classes")
        axes.errorbar(probabilities, right, yerr=[below, above], fmt="o", color=COLORS[0], capsize=2, label=label)
        axes.set(
            title=f"{title}\n{_figure('calibration error', reliability.error, reliability.error_interval)}\n"
            + _figure("Brier score", reliability.brier, reliability.brier_interval),
            xlabel="probability",
            ylabel=share,
            xlim=(-0.02, 1.02),
            ylim=(-0.02, 1.02),
            aspect="equal",
        )
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return output


def _figure(name: str, value: float, ends: tuple[float, float] | None) -> str:
    return f"{name} {value:.3f}" + ("" if ends is None else f" ({ends[0]:.3f} to {ends[1]:.3f})")


MOST = 2**14  # pairs of each kind: the variance of more pairs is small compared with that of the classes


def probability_at(score: float, given: PairProbability, prior: float = 0.5) -> float:
    """Return the probability that two images are of the same class, if a share ``prior`` of the pairs is, in (0, 1).

    Example:
        >>> given = PairProbability(slope=2.0, offset=-1.0, reliability=None)
        >>> probability_at(0.5, given), round(probability_at(0.5, given, prior=0.1), 3)
        (0.5, 0.1)
    """
    return Sigmoid(0.0, given.slope, given.offset + log(prior / (1 - prior))).at(None, score)


def fit_pair_probability(points: Points) -> PairProbability:
    """Fit the probability to pairs of points of classes that the model was not trained on, at most `MOST` of a kind."""
    pairs = sampled_pairs(points.labels, points.groups)
    sides = (points.embeddings[rows.to(points.embeddings.device)].double() for rows in pairs)
    scores = points.manifold.paired_similarity(*sides).cpu().numpy()
    return fit_scores(scores, points.labels.cpu()[torch.stack(pairs, 1)].numpy())


def fit_scores(scores: np.ndarray, classes_of: np.ndarray) -> PairProbability:
    """Fit the probability to the scores (P,) float64 of pairs of images of classes (P, 2) int64."""
    same, nothing = classes_of[:, 0] == classes_of[:, 1], np.zeros(len(scores))
    trials = Trials(nothing, scores, same, ~same, classes_of, classes_of)
    fitted, classes = trials.fit(), len(np.unique(trials.classes))
    reliability = trials.reliability() if classes >= LEAST_CLASSES else None
    return PairProbability(slope=fitted.score_slope, offset=fitted.offset, reliability=reliability)


def sampled_pairs(labels: Tensor, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw rows (P,) and (P,) of pairs of points: at most `MOST` of the same class and as many of different classes.

    Pairs of one group are left out; those of different classes after they were drawn.
    """
    classes, generator = labels.cpu().numpy(), np.random.default_rng(0)
    rows = np.arange(len(classes))
    own = rows if groups is None else groups.cpu().numpy()
    order = np.lexsort((own, classes))
    ordered = classes[order]
    ends = np.searchsorted(ordered, ordered, side="right")
    lasts = np.flatnonzero(np.append((np.diff(ordered) != 0) | (np.diff(own[order]) != 0), True)) + 1  # of each group
    others = lasts[np.searchsorted(lasts, rows, side="right")]
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for starts, counts in ((others, ends - others), (ends, len(rows) - ends)):  # partners of each row
        last = counts.cumsum()
        drawn = np.arange(last[-1]) if last[-1] <= MOST else generator.choice(last[-1], MOST, replace=False)
        first = np.searchsorted(last, drawn, side="right")
        pairs.append((order[first], order[starts[first] + drawn - (last - counts)[first]]))
    firsts, seconds = (np.concatenate(side) for side in zip(*pairs, strict=True))
    kept = own[firsts] != own[seconds]
    return torch.from_numpy(firsts[kept]), torch.from_numpy(seconds[kept])
