"""Verdicts: whether what a study's claim states holds for the runs."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

from dmlkit.evaluation.statistics import Comparison, holm, runs_to_separate
from dmlkit.run_folder.documents import Metrics
from dmlkit.study.definition.config import Expectation
from dmlkit.study.findings.looks import compare_at_looks, is_within, paired_figures
from dmlkit.study.findings.variant_results import VariantResults

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
