"""What the runs of a study say: intervals, paired differences and verdicts, as a document."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel

from dmlkit.evaluation.significance import Comparison, paired_runs, runs_to_separate
from dmlkit.files.document import Document
from dmlkit.run_folder.documents import Environment, Metrics, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.config import Candidate, Expectation, Study, Variant
from dmlkit.study.protocol import MeanInterval, ProtocolName

Verdict = Literal["holds", "does not hold", "not separable at this size"]


@dataclass(frozen=True)
class Choice:
    """A variant's candidate that was chosen on validation classes, and its runs.

    Args:
        candidate: the one chosen.
        scores: on validation classes, one a candidate of the variant.
        figures: on test classes, by seed.
    """

    candidate: Candidate
    scores: tuple[float, ...]
    figures: dict[int, Metrics]

    def values(self, metric: str) -> list[float]:
        """One figure a seed."""
        return [figures[metric] for figures in self.figures.values()]


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
    """Scores on validation classes with the first seed, by label."""


class VariantResults(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The figures of a variant."""

    tuned: Tuned | None
    """Null where there was nothing to choose."""
    runs: dict[int, Metrics]
    """Figures on test classes, by seed."""
    summary: dict[str, MeanInterval]
    """Over seeds, by metric."""
    difference: dict[str, Difference] | None
    """From the reference, by metric; null for the reference itself."""


class Cost(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What a study took."""

    models: int
    """That were trained."""
    seconds: float
    """Of training and validation, over all models."""
    on: tuple[str, ...]
    """What computed, with its versions."""

    @classmethod
    def of(cls, runs: Sequence[Path]) -> "Cost":
        """That of finished runs."""
        folders = [RunFolder(path) for path in runs]
        return cls(
            models=len(folders),
            seconds=round(sum(Summary.read(folder.summary_path).seconds for folder in folders), 1),
            on=tuple(sorted({Environment.read(folder.environment_path).device for folder in folders})),
        )


class StudyResults(Document, frozen=True, use_attribute_docstrings=True):
    """``results.json`` of a study: everything that a report tells of it."""

    kind: ClassVar[str] = "document of a study's results"

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


def summarize_study(study: Study, choices: Mapping[str, Choice], cost: Cost, command: str) -> StudyResults:
    """Everything that a report of a study tells; an interval that does not exist is none.

    Means have a 95 % t-interval over seeds. Differences are paired: of runs with the same seed, with Student's paired
    t-test. A statement of the claim gets its verdict from that interval, see `verdict`.
    """
    config = study.config
    return StudyResults(
        claim=config.claim,
        paper=config.paper,
        table=config.table,
        protocol=config.protocol,
        seeds=config.seeds,
        metrics=config.reported(),
        reference=study.reference,
        axis=SweptAxis(key=study.axis.key, values=study.axis.values) if study.axis else None,
        verdicts=tuple(_judged(expectation, choices) for expectation in config.expect),
        variants={variant.name: _variant_results(variant, study, choices) for variant in study.variants},
        cost=cost,
        command=command,
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


def _judged(expectation: Expectation, choices: Mapping[str, Choice]) -> JudgedStatement:
    base, method = (choices[name].values(expectation.metric) for name in (expectation.than, expectation.better))
    comparison = paired_runs(base, method)
    judged = {"verdict": verdict(comparison), "runs_to_separate": runs_to_separate(base, method)}
    return JudgedStatement.model_validate({**expectation.model_dump(), **_finite(comparison), **judged})


def _variant_results(variant: Variant, study: Study, choices: Mapping[str, Choice]) -> VariantResults:
    choice, reference, metrics = choices[variant.name], choices[study.reference], study.config.reported()
    labels = [candidate.label for candidate in variant.candidates]
    scores = dict(zip(labels, choice.scores, strict=True))
    changes = {name: Difference.of(paired_runs(reference.values(name), choice.values(name))) for name in metrics}
    return VariantResults(
        tuned=Tuned(chosen=choice.candidate.label, validation=scores) if len(labels) > 1 else None,
        runs={seed: {name: figures[name] for name in metrics} for seed, figures in choice.figures.items()},
        summary={name: MeanInterval.of(choice.values(name)) for name in metrics},
        difference=None if variant.name == study.reference else changes,
    )


def _finite(comparison: Comparison) -> dict[str, float | None]:
    return {name: value if isfinite(value) else None for name, value in asdict(comparison).items()}
