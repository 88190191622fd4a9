"""What the runs of a study say: intervals, paired differences and verdicts, as a document."""

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from dmlkit.evaluation.significance import Comparison, paired_runs, runs_to_separate
from dmlkit.files.document import Document
from dmlkit.run_folder.documents import Metrics
from dmlkit.study.choice import Choice
from dmlkit.study.config import Expectation, Study, StudyConfig, Variant
from dmlkit.study.cost import Cost
from dmlkit.study.looks import compare_at_looks, paired_figures
from dmlkit.study.protocol import MeanInterval, ProtocolName

Verdict = Literal["holds", "does not hold", "not separable at this size"]


class Difference(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """How runs of a variant differ from those of another with the same seeds, by Student's paired t-test."""

    difference: float
    """Mean of this variant's minus the other's."""
    low: float | None
    """Of the 95 % interval; null where a single pair has none."""
    high: float | None
    """As ``low``."""
    p_value: float
    """How probable a difference this far from 0 is where there is none."""

    @classmethod
    def of(cls, comparison: Comparison) -> "Difference":
        """As JSON can hold it: an endless interval is none."""
        return cls.model_validate(_finite(comparison))


class JudgedStatement(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A statement of the claim, and whether it holds."""

    better: str
    """The variant that is said to be better."""
    than: str
    """The variant that it is compared with."""
    metric: str
    """Of which more is better."""
    difference: float
    """As in `Difference`, and so are ``low``, ``high`` and ``p_value``."""
    low: float | None
    high: float | None
    p_value: float
    verdict: Verdict
    """See `verdict`."""
    runs_to_separate: int | None
    """About how many seeds would do; null where none would."""


class SweptAxis(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What a study sweeps, where that is one number."""

    key: str
    """Of the recipe."""
    values: tuple[int | float, ...]
    """One a variant, in their order."""


class Tuned(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What a variant was tuned by."""

    chosen: str
    """The label of the choice."""
    validation: dict[str, float]
    """Scores on validation classes, by label; the mean over the seeds that choose."""


class VariantResults(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The figures of a variant."""

    tuned: Tuned | None
    """Null where there was nothing to choose."""
    runs: dict[int, Metrics]
    """Figures on test classes, by seed."""
    summary: dict[str, MeanInterval]
    """Over seeds, by metric."""
    difference: dict[str, Difference] | None
    """From the reference, by metric; null for the reference itself, and where they share no seed."""


class StudyResults(Document, frozen=True, use_attribute_docstrings=True):
    """``results.json`` of a study: everything that a report tells of it."""

    kind: ClassVar[str] = "document of a study's results"
    version: ClassVar[int] = 2
    older: ClassVar[dict[int, tuple[str, ...]]] = {1: ()}  # was written of whole studies alone

    claim: str
    """What is claimed."""
    paper: str | None
    """That makes the claim."""
    table: str | None
    """Of the paper, where the claim is."""
    protocol: ProtocolName
    """How a run is split and scored."""
    seeds: tuple[int, ...]
    """One run of every variant a seed."""
    metrics: tuple[str, ...]
    """Names of the figures."""
    reference: str
    """The variant that the others are compared with."""
    axis: SweptAxis | None
    """What is swept, if it is one number."""
    verdicts: tuple[JudgedStatement, ...]
    """One a statement of the claim."""
    variants: dict[str, VariantResults]
    """By name, in the order of the study."""
    cost: Cost
    command: str
    """That repeats the study."""
    missing: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """The seeds that a variant of the study has no figures of."""
    failed: dict[str, str] = Field(default_factory=dict)
    """Reasons, by the name of a run."""
    tune_seeds: tuple[int, ...] = ()
    """That chose among tuned values; the first of ``seeds`` where there are none."""
    more_seeds: int = 0
    """How many seeds might be added, for which the intervals of verdicts allow."""


def summarize_study(
    study: Study, choices: Mapping[str, Choice], cost: Cost, command: str, *, failed: Mapping[str, str]
) -> StudyResults:
    """Everything that a report of a study tells; an interval that does not exist is none.

    Variants that have not chosen, or have no complete run, are left out, and so are statements without a pair of runs.

    Means have a 95 % t-interval over seeds. Differences are paired: of runs with the same seed, with Student's paired
    t-test. A statement of the claim gets its verdict from that interval, see `verdict`.
    """
    config = study.config
    kept = [index for index, variant in enumerate(study.variants) if variant.name in choices]
    variants = [study.variants[index] for index in kept]
    values = [study.axis.values[index] for index in kept] if study.axis else []
    had = {name: one.figures for name, one in choices.items()}
    lacks = {
        variant.name: tuple(seed for seed in config.seeds if seed not in had.get(variant.name, {}))
        for variant in study.variants
    }
    return StudyResults(
        claim=config.claim,
        paper=config.paper,
        table=config.table,
        protocol=config.protocol,
        seeds=config.seeds,
        metrics=config.reported(),
        reference=study.reference,
        axis=SweptAxis(key=study.axis.key, values=tuple(values)) if study.axis else None,
        verdicts=tuple(
            _judged(one, choices, config)
            for one in config.expect
            if had.get(one.better, {}).keys() & had.get(one.than, {}).keys()
        ),
        variants={variant.name: _variant_results(variant, study, choices) for variant in variants},
        cost=cost,
        command=command,
        missing={name: seeds for name, seeds in lacks.items() if seeds},
        failed=dict(failed),
        tune_seeds=config.tune_seeds,
        more_seeds=config.more_seeds,
    )


def verdict(comparison: Comparison) -> Verdict:
    """Whether "better than" holds: the 95 % interval of the paired difference lies above 0, below 0, or across it.

    Example:
        >>> verdict(paired_runs([0.5, 0.6, 0.7], [0.53, 0.64, 0.75]))
        'holds'
        >>> verdict(paired_runs([0.5], [0.9]))
        'not separable at this size'
    """
    if comparison.low > 0:
        return "holds"
    return "does not hold" if comparison.high < 0 else "not separable at this size"


def _judged(expectation: Expectation, choices: Mapping[str, Choice], config: StudyConfig) -> JudgedStatement:
    than, better = choices[expectation.than], choices[expectation.better]
    base, method = paired_figures(than.figures, better.figures, expectation.metric)
    first = len(config.seeds)
    comparison = compare_at_looks(base, method, first, first + config.more_seeds)
    judged = {"verdict": verdict(comparison), "runs_to_separate": runs_to_separate(base, method)}
    return JudgedStatement.model_validate({**expectation.model_dump(), **_finite(comparison), **judged})


def _variant_results(variant: Variant, study: Study, choices: Mapping[str, Choice]) -> VariantResults:
    choice, metrics = choices[variant.name], study.config.reported()
    labels = [candidate.label for candidate in variant.candidates]
    others = choices[study.reference].figures if study.reference in choices else {}
    is_compared = variant.name != study.reference and others.keys() & choice.figures.keys()
    pairs = {name: paired_figures(others, choice.figures, name) for name in metrics if is_compared}
    changes = {name: Difference.of(paired_runs(*figures)) for name, figures in pairs.items()}
    return VariantResults(
        tuned=Tuned(chosen=choice.candidate.label, validation=dict(zip(labels, choice.scores, strict=True)))
        if len(labels) > 1
        else None,
        runs={seed: {name: figures[name] for name in metrics} for seed, figures in choice.figures.items()},
        summary={name: MeanInterval.of(choice.values(name)) for name in metrics},
        difference=changes or None,
    )


def _finite(comparison: Comparison) -> dict[str, float | None]:
    return {name: value if isfinite(value) else None for name, value in asdict(comparison).items()}
