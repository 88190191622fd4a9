"""Verdicts on the statements of a claim, from the runs of two variants, and all results of a study as a document."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from dmlkit.files.document import Document
from dmlkit.metrics.statistics import Comparison, holm, paired_runs, runs_to_separate, t_interval
from dmlkit.run_folder.documents import ClassMetrics, Environment, Metrics, PairedDifference, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.definition.config import Axis, Candidate, Expectation, Study
from dmlkit.study.definition.methods import beyond_edge, grid_of, values_along
from dmlkit.study.record import StudySettings
from dmlkit.study.two_way import PairedClasses

End = Literal["lowest", "highest", "only", "only, lowest", "only, highest"]
"""Place of a chosen value among the values tried with the chosen values of the other keys. The only one of these may
also be the lowest or highest of all values of the key."""
END_TEXTS: dict[End, str] = {
    "lowest": "the lowest tried",
    "highest": "the highest tried",
    "only": "the only one tried with the other chosen values",
    "only, lowest": "the lowest tried, and the only one with the other chosen values",
    "only, highest": "the highest tried, and the only one with the other chosen values",
}


class MeanInterval(BaseModel, frozen=True, extra="forbid"):
    """Mean of runs and its 95 % interval by Student's t; a single run has no interval."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: list[float]) -> "MeanInterval":
        """Return the mean and interval of one figure per run."""
        interval = t_interval(values)
        low, high = (interval.low, interval.high) if len(values) > 1 else (None, None)
        return cls(mean=interval.mean, low=low, high=high)


class Tuned(BaseModel, frozen=True, extra="forbid"):
    """Tuning of a variant."""

    chosen: str  # label of the chosen values
    validation: dict[str, float]  # scores on validation classes, by label; the mean over the tuning seeds
    edge: dict[str, End] = {}  # keys whose chosen value has no tried value beyond it: a better one may be there


class VariantResults(BaseModel, frozen=True, extra="forbid"):
    """Figures of a variant."""

    tuned: Tuned | None = None  # null if nothing was tuned
    runs: dict[int, Metrics]  # figures on test classes by seed, of the best checkpoint on validation classes
    last: dict[int, Metrics] = {}  # figures after all epochs; without those that only the best checkpoints have
    pretrained: Metrics | None = None
    """Figures of the variant's backbone before training, without its head; null if they are not known."""
    summary: dict[str, MeanInterval]  # mean of ``runs`` over seeds, by metric
    difference: dict[str, PairedDifference] | None = None
    """Difference from the reference by metric; null for the reference itself, or if they share no seed."""
    classes: dict[int, ClassMetrics] | None = Field(default=None, exclude=True)
    """Figures on each test class by seed, for intervals over seeds and classes. They are in the runs, and not in a file
    of results, of which they were nine tenths; None in what is read, and for the Reality Check."""

    @classmethod
    def of(cls, runs: dict[int, Metrics], metrics: Sequence[str], **others: Any) -> "VariantResults":
        """Return the figures of runs with their means over seeds."""
        summary = {name: MeanInterval.of([run[name] for run in runs.values()]) for name in metrics}
        return cls(runs=runs, summary=summary, **others)

    def is_below_pretrained(self, metric: str) -> bool:
        """Return whether the mean is below that of the backbone before training; False if that is unknown."""
        floor = None if self.pretrained is None else self.pretrained.get(metric)
        return floor is not None and fmean(run[metric] for run in self.runs.values()) < floor


class PairedFigures(NamedTuple):
    """A figure of two variants for the seeds that both have, in the order of the first variant."""

    base: list[float]
    method: list[float]
    by_class: PairedClasses | None = None  # differences on each class, if they are known

    @classmethod
    def of(cls, base: VariantResults, method: VariantResults, metric: str) -> "PairedFigures":
        """Pair the runs of two variants by their seeds."""
        first, second = base.runs, method.runs
        seeds = [seed for seed in first if seed in second]
        by_class = PairedClasses.of(base.classes, method.classes, metric, seeds)
        return cls([first[seed][metric] for seed in seeds], [second[seed][metric] for seed in seeds], by_class)

    def compare(self) -> Comparison:
        """Return the mean difference with its 95 % interval, over seeds and, if they are known, classes."""
        return paired_runs(self.base, self.method) if self.by_class is None else self.by_class.compare()


def differences(
    variant: VariantResults, reference: VariantResults, metrics: Sequence[str]
) -> dict[str, PairedDifference] | None:
    """Return by metric the difference of a variant from the reference; None if they share no seed."""
    if not reference.runs.keys() & variant.runs.keys():
        return None
    changes = {name: PairedFigures.of(reference, variant, name).compare().as_dict() for name in metrics}
    return {name: PairedDifference.model_validate(change) for name, change in changes.items()}


def edges_of(candidates: Sequence[Candidate], chosen: Candidate) -> dict[str, End]:
    """Return the tuned keys whose chosen value is at an edge.

    At an edge, no value in one direction was tried with the chosen values of the other keys, or in both directions if
    the value is the only one. Only numbers have edges, and 1 has no edge below it if the key takes only integers.
    """
    edges: dict[str, End] = {}
    steps = beyond_edge(candidates, candidates, chosen)
    for key, value in chosen.values.items():
        known = grid_of([candidate.values[key] for candidate in candidates])
        is_alone = len(grid_of(values_along(candidates, chosen, key))) == 1
        for step in (values[key] for values in steps if values[key] != value):
            if not is_alone:
                edges[key] = "lowest" if step < value else "highest"
            elif step not in known:
                edges[key] = "only, lowest" if step < value else "only, highest"
        if known and is_alone:
            edges.setdefault(key, "only")
    return edges


def end_text(edge: Mapping[str, End]) -> str:
    """Return which chosen values are at an edge, in words; empty without any."""
    return ", ".join(f"{key} {END_TEXTS[end]}" for key, end in edge.items())


Verdict = Literal[
    "holds",
    "does not hold",
    "makes no difference",
    "not separable at this size",
    "not trained",
    "equal by construction",
]
LEVEL = 0.05  # a difference with at least this p-value may be chance, over all looks at a statement
SAME = 1e-6  # figures that differ by at most this on every seed are of one method under two names


class JudgedStatement(PairedDifference, Expectation, frozen=True):
    """Statement of the claim with its verdict and the paired difference of the two variants over seeds."""

    classes: int | None = None
    """Number of test classes over which interval and p-value are, in addition to seeds; null if over seeds alone."""
    verdict: Verdict  # without correction for other statements; see `verdict`
    runs_to_separate: int | None  # approximate number of seeds that would decide the statement; null if no number would
    corrected_p_value: float  # corrected for the number of statements, see `holm`
    corrected_verdict: Verdict  # by the corrected p-value
    at_edge: tuple[str, ...] = ()  # those of the two variants whose tuned values are at an edge
    not_trained: tuple[str, ...] = ()
    """Those of the two variants that are below their backbone before training by this metric."""

    @property
    def text(self) -> str:
        """The statement in words."""
        return f"{self.better} better than {self.than}"


FIGURE_PAIRS = (("recall@1", "map@r"), ("precision@1", "map@r"))
"""Figures of one question: papers report the first one, and the second one also counts the order of later neighbors."""


def by_both_figures(statements: Sequence[Expectation], metrics: Sequence[str]) -> tuple[Expectation, ...]:
    """Return the statements with each figure by which they are judged.

    A statement by a figure of `FIGURE_PAIRS` is judged by both figures of the pair if the study reports both: the two
    may disagree, and the more favorable one must not be the only one that is shown.
    """
    distinct: dict[tuple[str, str, str], Expectation] = {}
    for statement in statements:
        for metric in _figures_of(statement.metric, metrics):
            distinct.setdefault(
                (statement.better, statement.than, metric), statement.model_copy(update={"metric": metric})
            )
    return tuple(distinct.values())


def _figures_of(metric: str, metrics: Sequence[str]) -> tuple[str, ...]:
    kind, space, name = metric.rpartition(" ")  # the Reality Check has separated and concatenated figures
    for pair in FIGURE_PAIRS:
        figures = tuple(f"{kind}{space}{figure}" for figure in pair)
        if name in pair and set(figures) <= set(metrics):
            return figures
    return (metric,)


def judge(
    statements: Sequence[Expectation],
    variants: Mapping[str, VariantResults],
    seeds: int,
    more_seeds: int,
    negligible: float | None = None,
) -> tuple[JudgedStatement, ...]:
    """Return a verdict for each statement whose variants have runs with common seeds.

    If both variants have the same figures, or training improved one of them by no figure by which the statement is
    judged, the difference says nothing about the claim even if it is certain: the verdict is then "equal by
    construction" or "not trained".

    Args:
        statements: statements of the claim, each by one figure; see `by_both_figures`. All of them are corrected for.
        more_seeds: number of seeds that may be added, each after a test of the difference; see `compare_at_looks`.
    """
    compared: list[tuple[Expectation, PairedFigures, Comparison, Verdict]] = []
    for statement in statements:
        if statement.better in variants and statement.than in variants:
            pairs = PairedFigures.of(variants[statement.than], variants[statement.better], statement.metric)
            if pairs.base:
                change = compare_at_looks(pairs, seeds, seeds + more_seeds)
                compared.append((statement, pairs, change, _aside(statement, variants) or verdict(change, negligible)))
    corrected = holm([1.0 if word == "equal by construction" else change.p_value for _, _, change, word in compared])
    judged: list[JudgedStatement] = []
    for (statement, (base, method, by_class), change, word), p_value in zip(compared, corrected, strict=True):
        pair = {name: variants[name] for name in (statement.better, statement.than)}
        decided = word in ("holds", "does not hold")
        needed = runs_to_separate(base, method) if by_class is None else by_class.runs_to_separate()
        details = {
            "classes": None if by_class is None else len(by_class.queries),
            "verdict": word,
            "runs_to_separate": needed if word == "not separable at this size" or decided else None,
            "corrected_p_value": p_value,
            "corrected_verdict": "not separable at this size" if decided and p_value >= LEVEL else word,
            "at_edge": tuple(name for name, variant in pair.items() if variant.tuned and variant.tuned.edge),
            "not_trained": tuple(
                name for name, variant in pair.items() if variant.is_below_pretrained(statement.metric)
            ),
        }
        judged.append(JudgedStatement.model_validate({**statement.model_dump(), **change.as_dict(), **details}))
    return tuple(judged)


def verdict(comparison: Comparison, negligible: float | None = None) -> Verdict:
    """Return the verdict on "better than", by the 95 % interval of the paired difference.

    The statement holds if the interval is above 0, and does not hold if it is below 0. An interval that includes 0
    makes no difference if it lies within plus and minus the negligible difference; otherwise the two are not separable.
    This equivalence test by two one-sided tests (Schuirmann, J. Pharmacokinet. Biopharm. 1987) has a wider interval
    than usual: it is wrong in at most 2.5 % of cases.
    """
    if comparison.low > 0:
        return "holds"
    if comparison.high < 0:
        return "does not hold"
    is_negligible = negligible is not None and max(-comparison.low, comparison.high) <= negligible
    return "makes no difference" if is_negligible else "not separable at this size"


def are_equal(first: Mapping[int, Metrics], second: Mapping[int, Metrics]) -> bool:
    """Return whether two variants have the same seeds, and on each seed the same figures in every metric, to `SAME`."""
    return first.keys() == second.keys() and all(
        abs(value - second[seed][name]) <= SAME for seed, figures in first.items() for name, value in figures.items()
    )


def _aside(statement: Expectation, variants: Mapping[str, VariantResults]) -> Verdict | None:
    """Return the verdict of a statement whose difference says nothing about the claim."""
    better, than = variants[statement.better], variants[statement.than]
    if are_equal(better.runs, than.runs) and are_equal(better.last, than.last):
        return "equal by construction"
    figures = _figures_of(statement.metric, tuple(better.summary))
    is_untrained = (all(variant.is_below_pretrained(metric) for metric in figures) for variant in (better, than))
    return "not trained" if any(is_untrained) else None


REPETITIONS = 100_000  # of the simulation: its bound is accurate to 1.5 %


def compare_at_looks(pairs: PairedFigures, first: int, last: int) -> Comparison:
    """Compare pairs, with a correction for tests after ``first`` to ``last`` of them.

    Pocock's bound (Biometrika 1977): every look has the same level, such that all looks together find a difference
    where there is none with probability 5 %. His table is for a known variance, which is unknown here: the bound is the
    5 % quantile of the smallest p-value of Student's test over the looks, in a simulation without a difference. The
    corrected p-value is the share of simulations whose smallest p-value is at most the observed one. Classes are the
    same at all looks, which makes the correction larger than necessary for an interval over seeds and classes.
    """
    from scipy.special import stdtrit

    once, freedom = pairs.compare(), len(pairs.base) - 1
    if last <= first or not freedom:
        return once
    simulated = least_p_values(first, last)
    bound = float(simulated[int(LEVEL * len(simulated))])
    margin = (once.high - once.difference) * float(stdtrit(freedom, 1 - bound / 2) / stdtrit(freedom, 1 - LEVEL / 2))
    if pairs.by_class is not None:
        margin = pairs.by_class.compare(bound).high - once.difference
    p_value = (1 + int(np.searchsorted(simulated, once.p_value, side="right"))) / (1 + len(simulated))
    return replace(once, low=once.difference - margin, high=once.difference + margin, p_value=p_value)


def is_decided(pairs: PairedFigures, first: int, last: int, negligible: float | None = None) -> bool:
    """Return whether no more seeds are needed: the interval excludes 0 or is negligible, or all pairs are equal."""
    if len(pairs.base) < 2:
        return False
    are_same = max(abs(after - before) for before, after in zip(pairs.base, pairs.method, strict=True)) <= SAME
    return are_same or verdict(compare_at_looks(pairs, first, last), negligible) != "not separable at this size"


@cache
def least_p_values(first: int, last: int) -> NDArray[np.float64]:
    """Return the smallest p-values over the looks, ascending, of R simulations without a difference (R,)."""
    from scipy.special import stdtr

    changes = np.random.default_rng(0).standard_normal((REPETITIONS, last))  # a t statistic knows no unit
    counts = np.arange(max(2, first), last + 1)
    means = changes.cumsum(1)[:, counts - 1] / counts
    variances = ((changes**2).cumsum(1)[:, counts - 1] - counts * means**2) / (counts - 1)
    p_values = 2 * stdtr(counts - 1, -np.abs(means) * np.sqrt(counts / variances))
    return np.sort(p_values.min(1))


class Cost(BaseModel, frozen=True, extra="forbid"):
    """Cost of a study."""

    models: int  # number of trained models
    seconds: float  # seconds of training and validation, over all models
    on: tuple[str, ...]  # devices that trained, with versions

    @classmethod
    def of(cls, runs: Sequence[Path]) -> "Cost":
        """Return the cost of finished runs."""
        folders = [RunFolder(path) for path in runs]
        return cls(
            models=len(folders),
            seconds=round(sum(Summary.read(folder.summary_path).seconds for folder in folders), 1),
            on=tuple(sorted({Environment.read(folder.environment_path).device for folder in folders})),
        )


class StudyResults(StudySettings, Document, frozen=True):
    """``results.json`` of a study: the contents of its report."""

    kind: ClassVar[str] = "document of a study's results"

    axis: Axis | None  # the numeric key that is swept, if there is one
    verdicts: tuple[JudgedStatement, ...]  # one verdict per statement of the claim and figure; see `by_both_figures`
    variants: dict[str, VariantResults]  # figures by name of the variant, in the order of the study
    cost: Cost
    command: str  # repeats the study
    missing: dict[str, tuple[int, ...]] = Field(default_factory=dict)  # seeds without figures, by variant
    failed: dict[str, str] = Field(default_factory=dict)  # reasons of failures, by run


def summarize_study(
    study: Study, variants: Mapping[str, VariantResults], cost: Cost, command: str, failed: Mapping[str, str]
) -> StudyResults:
    """Add paired differences and verdicts to the results of variants.

    Variants without a complete run are omitted, and so are statements without a pair of runs.
    """
    config, axis, reference = study.config, study.axis, variants.get(study.config.reference)
    statements = by_both_figures(config.expect, config.metrics)
    names = [variant.name for variant in study.variants]
    indices = [index for index, name in enumerate(names) if name in variants]
    lacks = {
        name: tuple(seed for seed in config.seeds if name not in variants or seed not in variants[name].runs)
        for name in names
    }
    compared = {
        name: variant.model_copy(update={"difference": differences(variant, reference, config.metrics)})
        if reference and name != config.reference
        else variant
        for name, variant in variants.items()
    }
    return StudyResults(
        **config.model_dump(include={*StudySettings.model_fields}),
        axis=axis and axis.model_copy(update={"values": tuple(axis.values[index] for index in indices)}),
        verdicts=judge(statements, compared, len(config.seeds), config.more_seeds, config.negligible),
        variants=compared,
        cost=cost,
        command=command,
        missing={name: seeds for name, seeds in lacks.items() if seeds},
        failed=dict(failed),
    )
