"""Results of a study as a document: figures, intervals, paired differences and verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, Field

from dmlkit.files.document import Document
from dmlkit.run_folder.documents import Environment, Metrics, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.definition.config import Axis, Candidate, Study, Variant
from dmlkit.study.findings.two_way import VariantClasses
from dmlkit.study.findings.verdicts import (
    JudgedStatement,
    Runs,
    Tuned,
    VariantResults,
    by_both_figures,
    edges_of,
    judge,
    over_seeds,
)
from dmlkit.study.record import StudySettings


@dataclass(frozen=True)
class Choice:
    """Candidate of a variant that was chosen on validation classes, and its runs."""

    candidate: Candidate
    scores: tuple[float, ...]  # of each candidate on validation classes, the mean over the tuning seeds
    figures: dict[int, Metrics]  # on test classes, by seed
    classes: VariantClasses | None = None  # figures on each test class, if all runs have them

    @property
    def measured(self) -> Runs:
        """Figures by seed, and on each class."""
        return self.figures, self.classes


class Cost(BaseModel, frozen=True, extra="forbid"):
    """Cost of a study."""

    models: int
    """Number of trained models."""
    seconds: float
    """Seconds of training and validation, over all models."""
    on: tuple[str, ...]
    """Devices that trained, with versions."""

    @classmethod
    def of(cls, runs: Sequence[Path]) -> "Cost":
        """Return the cost of finished runs."""
        folders = [RunFolder(path) for path in runs]
        return cls(
            models=len(folders),
            seconds=round(sum(Summary.read(folder.summary_path).seconds for folder in folders), 1),
            on=tuple(sorted({Environment.read(folder.environment_path).device for folder in folders})),
        )


@dataclass(frozen=True)
class ExtraFigures:
    """Figures of a variant in addition to those that are compared."""

    last: Mapping[int, Metrics]  # on test classes after all epochs, by seed
    pretrained: Metrics | None  # of its backbone before training; None if they are not known


class StudyResults(StudySettings, Document, frozen=True):
    """``results.json`` of a study: the contents of its report."""

    kind: ClassVar[str] = "document of a study's results"

    axis: Axis | None
    """The numeric key that is swept, if there is one."""
    verdicts: tuple[JudgedStatement, ...]
    """One verdict per statement of the claim and figure; see `by_both_figures`."""
    variants: dict[str, VariantResults]
    """Figures by name of the variant, in the order of the study."""
    cost: Cost
    command: str
    """Command that repeats the study."""
    missing: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Seeds without figures, by variant."""
    failed: dict[str, str] = Field(default_factory=dict)
    """Reasons of failures, by run."""


def summarize_study(
    study: Study,
    choices: Mapping[str, Choice],
    cost: Cost,
    command: str,
    *,
    failed: Mapping[str, str] | None = None,
    extra: Mapping[str, ExtraFigures] | None = None,
) -> StudyResults:
    """Summarize the runs of a study: means, paired differences and verdicts.

    Variants without a choice or without a complete run are omitted, and so are statements without a pair of runs.

    Means have a 95 % t-interval over seeds; a single run has none. Differences are between runs with the same seed,
    with Student's paired t-test, which also gives the verdicts of statements; see `judge`.
    """
    config, axis, extra = study.config, study.axis, extra or {}
    statements = by_both_figures(config.expect, config.reported())
    kept = [index for index, variant in enumerate(study.variants) if variant.name in choices]
    lacks = {
        variant.name: tuple(
            seed for seed in config.seeds if variant.name not in choices or seed not in choices[variant.name].figures
        )
        for variant in study.variants
    }
    variants = {
        variant.name: _variant_results(variant, study, choices, extra.get(variant.name, ExtraFigures({}, None)))
        for variant in (study.variants[index] for index in kept)
    }
    return StudyResults(
        **config.model_dump(include={*StudySettings.model_fields} - {"metrics", "reference"}),
        metrics=config.reported(),
        reference=study.reference,
        axis=axis and axis.model_copy(update={"values": tuple(axis.values[index] for index in kept)}),
        verdicts=judge(statements, variants, len(config.seeds), config.more_seeds, config.negligible),
        variants=variants,
        cost=cost,
        command=command,
        missing={name: seeds for name, seeds in lacks.items() if seeds},
        failed=dict(failed or {}),
    )


def _variant_results(
    variant: Variant, study: Study, choices: Mapping[str, Choice], extra: ExtraFigures
) -> VariantResults:
    choice, metrics = choices[variant.name], study.config.reported()
    labels = [candidate.label for candidate in variant.candidates]
    runs = {seed: _of(figures, metrics) for seed, figures in choice.figures.items()}
    others = None if variant.name == study.reference else choices.get(study.reference)
    summary, difference = over_seeds((runs, choice.classes), others.measured if others else None, metrics)
    tuned = None
    if len(labels) > 1:
        scores = dict(zip(labels, choice.scores, strict=True))
        edge = edges_of(variant.candidates, choice.candidate)
        tuned = Tuned(chosen=choice.candidate.label, validation=scores, edge=edge)
    return VariantResults(
        tuned=tuned,
        runs=runs,
        last={seed: _of(figures, metrics) for seed, figures in extra.last.items()},
        pretrained=None if extra.pretrained is None else _of(extra.pretrained, metrics),
        summary=summary,
        difference=difference,
        classes=choice.classes,
    )


def _of(figures: Metrics, metrics: Sequence[str]) -> Metrics:
    return {name: figures[name] for name in metrics if name in figures}
