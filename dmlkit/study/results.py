"""What the runs of a study say: intervals, paired differences and verdicts, as a document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel

from dmlkit.files.document import Document
from dmlkit.run_folder.documents import Environment, Metrics, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.config import Candidate, Study, Variant
from dmlkit.study.protocol import ProtocolName
from dmlkit.study.variant_results import Tuned, VariantResults, edges_of, over_seeds
from dmlkit.study.verdicts import JudgedStatement, judge


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


@dataclass(frozen=True)
class Beside:
    """What is told of a variant beside the figures that are compared.

    Args:
        last: its figures on test classes after all epochs, by seed.
        untrained: those of its backbone before training; None where they are not known.
    """

    last: Mapping[int, Metrics]
    untrained: Metrics | None


class SweptAxis(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What a study sweeps, where that is one number."""

    key: str
    """Of the recipe."""
    values: tuple[int | float, ...]
    """One a variant, in their order."""


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
    version: ClassVar[int] = 2
    older: ClassVar[dict[int, tuple[str, ...]]] = {1: ()}  # no correction, edges, last epoch or untrained network

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


def summarize_study(
    study: Study,
    choices: Mapping[str, Choice],
    cost: Cost,
    command: str,
    *,
    beside: Mapping[str, Beside] | None = None,
) -> StudyResults:
    """Everything that a report of a study tells; an interval that does not exist is none.

    Means have a 95 % t-interval over seeds. Differences are paired: of runs with the same seed, with Student's paired
    t-test. A statement of the claim gets its verdict from that, see `judge`.

    Args:
        study: what was compared.
        choices: what each variant was trained with, and its figures.
        cost: of all runs.
        command: that repeats the study.
        beside: figures of each variant that are told too; see `dmlkit.study.beside`.
    """
    config, beside = study.config, beside or {}
    variants = {
        variant.name: _variant_results(variant, study, choices, beside.get(variant.name, Beside({}, None)))
        for variant in study.variants
        if variant.name in choices
    }
    return StudyResults(
        claim=config.claim,
        paper=config.paper,
        table=config.table,
        protocol=config.protocol,
        seeds=config.seeds,
        metrics=config.reported(),
        reference=study.reference,
        axis=SweptAxis(key=study.axis.key, values=study.axis.values) if study.axis else None,
        verdicts=judge(config.expect, variants),
        variants=variants,
        cost=cost,
        command=command,
    )


def _variant_results(variant: Variant, study: Study, choices: Mapping[str, Choice], beside: Beside) -> VariantResults:
    choice, metrics = choices[variant.name], study.config.reported()
    labels = [candidate.label for candidate in variant.candidates]
    runs = {seed: _of(figures, metrics) for seed, figures in choice.figures.items()}
    others = None if variant.name == study.reference or study.reference not in choices else choices[study.reference]
    summary, difference = over_seeds(runs, others.figures if others else None, metrics)
    tuned = None
    if len(labels) > 1:
        scores = dict(zip(labels, choice.scores, strict=True))
        edge = edges_of(variant.candidates, choice.candidate)
        tuned = Tuned(chosen=choice.candidate.label, validation=scores, edge=edge)
    return VariantResults(
        tuned=tuned,
        runs=runs,
        last={seed: _of(figures, metrics) for seed, figures in beside.last.items()},
        untrained=None if beside.untrained is None else _of(beside.untrained, metrics),
        summary=summary,
        difference=difference,
    )


def _of(figures: Metrics, metrics: Sequence[str]) -> Metrics:
    return {name: figures[name] for name in metrics if name in figures}
