"""Verdicts: what the seeds of two variants say about a claim, looked at as they come in."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from dmlkit.evaluation.statistics import Comparison, holm, paired_runs, runs_to_separate
from dmlkit.run_folder.documents import Metrics
from dmlkit.study.definition.config import Candidate, Expectation
from dmlkit.study.definition.methods import beyond_edge, grid_of, values_along
from dmlkit.study.protocol import MeanInterval

End = Literal["lowest", "highest", "only", "only, lowest", "only, highest"]
"""Of the values tried with the chosen ones of the other keys. The only one of these may be the lowest or highest of all
values of the key."""


class Difference(BaseModel, frozen=True, extra="forbid"):
    """How runs of a variant differ from those of another with the same seeds, by Student's paired t-test."""

    difference: float
    """Mean of this variant's minus the other's."""
    low: float | None
    """Of the 95 % interval; null where a single pair has none."""
    high: float | None
    """As ``low``."""
    p_value: float
    """How probable a difference this far from 0 is where there is none."""


class Tuned(BaseModel, frozen=True, extra="forbid"):
    """What a variant was tuned by."""

    chosen: str
    """The label of the choice."""
    validation: dict[str, float]
    """Scores on validation classes, by label; the mean over the seeds that choose."""
    edge: dict[str, End] = {}
    """Keys of which the chosen value has no tried one beyond it: a better one may lie there."""


class VariantResults(BaseModel, frozen=True, extra="forbid"):
    """The figures of a variant."""

    tuned: Tuned | None
    """Null where there was nothing to choose."""
    runs: dict[int, Metrics]
    """Figures on test classes, by seed, of the checkpoint that was best on validation classes."""
    last: dict[int, Metrics] = {}
    """Those after all epochs; without what the best checkpoints alone were scored for."""
    untrained: Metrics | None = None
    """Those of the variant's backbone before training, without its head; null where they are not known."""
    summary: dict[str, MeanInterval]
    """Over seeds, by metric, of ``runs``."""
    difference: dict[str, Difference] | None
    """From the reference, by metric; null for the reference itself, and where they share no seed."""

    def is_below_untrained(self, metric: str) -> bool:
        """Whether training did not get to what its backbone could do before; not where that is unknown."""
        floor = None if self.untrained is None else self.untrained.get(metric)
        return floor is not None and fmean(run[metric] for run in self.runs.values()) < floor


def over_seeds(
    runs: Mapping[int, Metrics], reference: Mapping[int, Metrics] | None, metrics: Sequence[str]
) -> tuple[dict[str, MeanInterval], dict[str, Difference] | None]:
    """By metric, a variant's mean over seeds, and its difference to another reference of which it shares seeds.

    Args:
        runs: figures by seed.
        reference: likewise, of the variant that the others are compared with; None for itself.
        metrics: which.
    """
    summary = {name: MeanInterval.of([run[name] for run in runs.values()]) for name in metrics}
    if reference is None:
        return summary, None
    pairs = {name: paired_figures(reference, runs, name) for name in metrics}
    changes = {name: paired_runs(*figures).as_dict() for name, figures in pairs.items() if figures[0]}
    return summary, {name: Difference.model_validate(one) for name, one in changes.items()} or None


def edges_of(candidates: Sequence[Candidate], chosen: Candidate) -> dict[str, End]:
    """Return the tuned keys of which the chosen value is at an edge: in one direction, or in both where it is the only
    one, nothing was tried with the chosen values of the other keys.

    Only numbers have an order, and nothing lies beyond 1 where the key takes whole numbers alone.

    Args:
        candidates: of a variant, all that were tried.
        chosen: one of them.
    """
    edges: dict[str, End] = {}
    steps = beyond_edge(candidates, candidates, chosen)
    for key, value in chosen.values.items():
        known = grid_of([one.values[key] for one in candidates])
        is_alone = len(grid_of(values_along(candidates, chosen, key))) == 1
        for step in (one[key] for one in steps if one[key] != value):
            if not is_alone:
                edges[key] = "lowest" if step < value else "highest"
            elif step not in known:
                edges[key] = "only, lowest" if step < value else "only, highest"
        if known and is_alone:
            edges.setdefault(key, "only")
    return edges


Verdict = Literal[
    "holds",
    "does not hold",
    "makes no difference",
    "not separable at this size",
    "not trained",
    "equal by construction",
]
LEVEL = 0.05  # a p-value from which on a difference may be chance
SAME = 1e-6  # figures that differ by less on every seed are of one method under two names


class JudgedStatement(BaseModel, frozen=True, extra="forbid"):
    """A statement of the claim, and whether it holds."""

    better: str
    """The variant that is said to be better."""
    than: str
    """The variant that it is compared with."""
    metric: str
    """Of which more is better."""
    paper: str | None = None
    """That says so, in a word."""
    difference: float
    """As in `Difference`, and so are ``low``, ``high`` and ``p_value``."""
    low: float | None
    high: float | None
    p_value: float
    verdict: Verdict
    """See `verdict`; by this statement alone."""
    runs_to_separate: int | None
    """About how many seeds would do; null where none would, or where more would not help."""
    corrected_p_value: float | None = None
    """Corrected for the number of statements, see `holm`; null in results of dmlkit 0.1.0."""
    corrected_verdict: Verdict | None = None
    """By that; null as well."""
    at_edge: tuple[str, ...] = ()
    """Which of the two variants were tuned to the lowest or highest value tried."""
    not_trained: tuple[str, ...] = ()
    """Which of the two lie below their backbone before training."""


def judge(
    statements: Sequence[Expectation],
    variants: Mapping[str, VariantResults],
    seeds: int,
    more_seeds: int,
    negligible: float | None = None,
) -> tuple[JudgedStatement, ...]:
    """A verdict for each statement whose variants have runs of the same seeds.

    Where the runs of both end with the same figures, or one of the two has not learned, the difference says nothing of
    the claim, however sure it is: the verdict is "equal by construction" or "not trained".

    Args:
        statements: of the claim.
        variants: by name, with the figures of their runs.
        seeds: how many every variant has.
        more_seeds: how many might be added, each after a look at the difference; see `compare_at_looks`.
        negligible: a difference that does not matter; see `is_within`.
    """
    found: list[tuple[Expectation, Comparison, Verdict]] = []
    for one in statements:
        if one.better in variants and one.than in variants:
            base, method = paired_figures(variants[one.than].runs, variants[one.better].runs, one.metric)
            if base:
                change = compare_at_looks(base, method, seeds, seeds + more_seeds)
                found.append((one, change, _aside(one, variants) or verdict(change, negligible)))
    corrected = holm([1.0 if word == "equal by construction" else change.p_value for _, change, word in found])
    return tuple(_judged(*row, p_value, variants) for row, p_value in zip(found, corrected, strict=True))


def verdict(comparison: Comparison, negligible: float | None = None) -> Verdict:
    """Whether "better than" holds: the 95 % interval of the paired difference lies above 0, below 0, or across it; then
    it makes no difference where the interval is within a negligible one, and cannot be told apart where it is not.

    Example:
        >>> from dmlkit.evaluation.statistics import paired_runs
        >>> verdict(paired_runs([0.5, 0.6, 0.7], [0.53, 0.64, 0.75]))
        'holds'
        >>> verdict(paired_runs([0.5], [0.9]))
        'not separable at this size'
        >>> verdict(paired_runs([0.5, 0.6, 0.7], [0.501, 0.601, 0.699]), negligible=0.005)
        'makes no difference'
    """
    if comparison.low > 0:
        return "holds"
    if comparison.high < 0:
        return "does not hold"
    return "makes no difference" if is_within(comparison, negligible) else "not separable at this size"


def are_equal(first: Mapping[int, Metrics], second: Mapping[int, Metrics]) -> bool:
    """Whether two variants have the same seeds and on each of them the same figures in every metric, to `SAME`.

    Example:
        >>> are_equal({0: {"map@r": 0.5}}, {0: {"map@r": 0.5 + 1e-9}}), are_equal({0: {"map@r": 0.5}}, {})
        (True, False)
    """
    return first.keys() == second.keys() and all(
        abs(value - second[seed][name]) <= SAME for seed, figures in first.items() for name, value in figures.items()
    )


def _aside(one: Expectation, variants: Mapping[str, VariantResults]) -> Verdict | None:
    """The verdict of a statement whose difference does not speak of the claim."""
    better, than = variants[one.better], variants[one.than]
    if are_equal(better.runs, than.runs) and are_equal(better.last, than.last):
        return "equal by construction"
    return "not trained" if better.is_below_untrained(one.metric) or than.is_below_untrained(one.metric) else None


def _judged(
    one: Expectation,
    change: Comparison,
    word: Verdict,
    corrected: float,
    variants: Mapping[str, VariantResults],
) -> JudgedStatement:
    pair = {name: variants[name] for name in (one.better, one.than)}
    decided = word in ("holds", "does not hold")
    told = {
        "verdict": word,
        "runs_to_separate": _more(one, variants) if word == "not separable at this size" or decided else None,
        "corrected_p_value": corrected,
        "corrected_verdict": "not separable at this size" if decided and corrected >= LEVEL else word,
        "at_edge": tuple(name for name, variant in pair.items() if variant.tuned and variant.tuned.edge),
        "not_trained": tuple(name for name, variant in pair.items() if variant.is_below_untrained(one.metric)),
    }
    return JudgedStatement.model_validate({**one.model_dump(), **change.as_dict(), **told})


def _more(one: Expectation, variants: Mapping[str, VariantResults]) -> int | None:
    return runs_to_separate(*paired_figures(variants[one.than].runs, variants[one.better].runs, one.metric))


LOOKS_LEVEL = 0.05  # of verdicts, over all looks at a statement
REPETITIONS = 100_000  # of the simulation: the bound is known to 1.5 %
LOOKS_SAME = 1e-6  # figures that differ by less are equal: more seeds would show nothing


def paired_figures(
    first: Mapping[int, Metrics], second: Mapping[int, Metrics], metric: str
) -> tuple[list[float], list[float]]:
    """A figure of two variants, of the seeds that both have.

    Args:
        first, second: figures by seed.
        metric: which.

    Example:
        >>> paired_figures({0: {"mrr": 0.1}, 1: {"mrr": 0.2}}, {1: {"mrr": 0.3}, 2: {"mrr": 0.4}}, "mrr")
        ([0.2], [0.3])
    """
    both = [seed for seed in first if seed in second]
    return [first[seed][metric] for seed in both], [second[seed][metric] for seed in both]


def compare_at_looks(base: list[float], method: list[float], first: int, last: int) -> Comparison:
    """`paired_runs`, where one looks after ``first`` pairs and after each further one up to ``last`` of them.

    Pocock's bound (Biometrika 1977): every look has the same level, such that over all of them no difference is called
    one in 5 %. His table is for a known spread, and here it is unknown: the bound is the 5 % quantile of the least p of
    Student's test over the looks, in a simulation without a difference. The p-value is how often the least one there
    is as small.

    Args:
        base, method: one figure a run, of the same seeds in the same order.
        first, last: pairs at the first and at the last look.

    Example:
        >>> once = compare_at_looks([0.5, 0.6, 0.7], [0.53, 0.64, 0.75], 3, 3)
        >>> often = compare_at_looks([0.5, 0.6, 0.7], [0.53, 0.64, 0.75], 3, 8)
        >>> round(once.p_value, 4), round(once.low, 4), often.p_value > 0.05, often.low < 0
        (0.0202, 0.0152, True, True)
    """
    from scipy.stats import t

    once = paired_runs(base, method)
    if last <= first or len(base) < 2:
        return once
    least = least_p_values(first, last)
    bound = float(least[int(LOOKS_LEVEL * len(least))])
    freedom = len(base) - 1
    margin = (once.high - once.difference) * float(t.ppf(1 - bound / 2, freedom) / t.ppf(1 - LOOKS_LEVEL / 2, freedom))
    p_value = (1 + int(np.searchsorted(least, once.p_value, side="right"))) / (1 + len(least))
    return replace(once, low=once.difference - margin, high=once.difference + margin, p_value=p_value)


def is_decided(base: list[float], method: list[float], first: int, last: int, negligible: float | None = None) -> bool:
    """Whether more seeds are not needed: the interval of the difference excludes 0 or is within what is negligible, or
    there is none at all."""
    if len(base) < 2:
        return False
    comparison = compare_at_looks(base, method, first, last)
    are_same = max(abs(after - before) for before, after in zip(base, method, strict=True)) < LOOKS_SAME
    return are_same or comparison.low > 0 or comparison.high < 0 or is_within(comparison, negligible)


def is_within(comparison: Comparison, negligible: float | None) -> bool:
    """Whether the 95 % interval lies within a difference that does not matter, to either side.

    It is the test of equivalence by two one-sided ones (Schuirmann, J. Pharmacokinet. Biopharm. 1987), with the wider
    interval of the verdicts: no difference by mistake in at most 2.5 %.

    Example:
        >>> change = compare_at_looks([0.5, 0.6, 0.7], [0.501, 0.601, 0.7], 3, 3)
        >>> is_within(change, 0.005), is_within(change, 0.001), is_within(change, None)
        (True, False, False)
    """
    return negligible is not None and max(-comparison.low, comparison.high) <= negligible


@cache
def least_p_values(first: int, last: int) -> NDArray[np.float64]:
    """The least p over the looks, ascending, in many repetitions without a difference (R,)."""
    from scipy.stats import t

    changes = np.random.default_rng(0).standard_normal((REPETITIONS, last))  # a t statistic knows no unit
    counts = np.arange(max(2, first), last + 1)
    means = changes.cumsum(1)[:, counts - 1] / counts
    variances = ((changes**2).cumsum(1)[:, counts - 1] - counts * means**2) / (counts - 1)
    p_values = 2 * t.sf(np.abs(means) * np.sqrt(counts / variances), counts - 1)
    return np.sort(p_values.min(1))
