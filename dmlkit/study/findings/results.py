"""What the runs of a study say: intervals, paired differences and verdicts, as a document."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, Field

from dmlkit.files.document import Document
from dmlkit.run_folder.documents import Environment, Metrics, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.definition.config import Candidate, Study, Variant
from dmlkit.study.findings.verdicts import JudgedStatement, Tuned, VariantResults, edges_of, judge, over_seeds
from dmlkit.study.protocol import ProtocolName


@dataclass(frozen=True)
class Choice:
    """A variant's candidate that was chosen on validation classes, and its runs.

    Args:
        candidate: the one chosen.
        scores: on validation classes, the mean over the seeds that choose, one a candidate of the variant.
        figures: on test classes, by seed.
    """

    candidate: Candidate
    scores: tuple[float, ...]
    figures: dict[int, Metrics]

    def values(self, metric: str) -> list[float]:
        """One figure a seed."""
        return [figures[metric] for figures in self.figures.values()]


class Cost(BaseModel, frozen=True, extra="forbid"):
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


@dataclass(frozen=True)
class ExtraFigures:
    """What is told of a variant beside the figures that are compared.

    Args:
        last: its figures on test classes after all epochs, by seed.
        untrained: those of its backbone before training; None where they are not known.
    """

    last: Mapping[int, Metrics]
    untrained: Metrics | None


class SweptAxis(BaseModel, frozen=True, extra="forbid"):
    """What a study sweeps, where that is one number."""

    key: str
    """Of the recipe."""
    values: tuple[int | float, ...]
    """One a variant, in their order."""


class StudyResults(Document, frozen=True):
    """``results.json`` of a study: everything that a report tells of it."""

    kind: ClassVar[str] = "document of a study's results"
    version: ClassVar[int] = 3
    # 1: of whole studies alone; no correction, edges, last epoch; 2: no edge where a value was the only one of its line
    older: ClassVar[dict[int, tuple[str, ...]]] = {1: (), 2: ()}

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
    negligible: float | None = None
    """A difference that does not matter: a statement whose interval is within it makes none."""
    rotate_folds: bool = False
    """Whether each seed validated on the next fold of the training classes."""


def summarize_study(
    study: Study,
    choices: Mapping[str, Choice],
    cost: Cost,
    command: str,
    *,
    failed: Mapping[str, str] | None = None,
    beside: Mapping[str, ExtraFigures] | None = None,
) -> StudyResults:
    """Everything that a report of a study tells; an interval that does not exist is none.

    Variants that have not chosen, or have no complete run, are left out, and so are statements without a pair of runs.

    Means have a 95 % t-interval over seeds. Differences are paired: of runs with the same seed, with Student's paired
    t-test. A statement of the claim gets its verdict from that, see `judge`.

    Args:
        study: what was compared.
        choices: what each variant was trained with, and its figures.
        cost: of all runs.
        command: that repeats the study.
        failed: reasons, by the name of a run.
        beside: figures of each variant that are told too; see `dmlkit.study.findings.extra_figures`.
    """
    config, beside = study.config, beside or {}
    kept = [index for index, variant in enumerate(study.variants) if variant.name in choices]
    lacks = {
        variant.name: tuple(
            seed for seed in config.seeds if variant.name not in choices or seed not in choices[variant.name].figures
        )
        for variant in study.variants
    }
    variants = {
        variant.name: _variant_results(variant, study, choices, beside.get(variant.name, ExtraFigures({}, None)))
        for variant in (study.variants[index] for index in kept)
    }
    return StudyResults(
        claim=config.claim,
        paper=config.paper,
        table=config.table,
        protocol=config.protocol,
        seeds=config.seeds,
        metrics=config.reported(),
        reference=study.reference,
        axis=SweptAxis(key=study.axis.key, values=tuple(study.axis.values[index] for index in kept))
        if study.axis
        else None,
        verdicts=judge(config.expect, variants, len(config.seeds), config.more_seeds, config.negligible),
        variants=variants,
        cost=cost,
        command=command,
        missing={name: seeds for name, seeds in lacks.items() if seeds},
        failed=dict(failed or {}),
        tune_seeds=config.tune_seeds,
        more_seeds=config.more_seeds,
        negligible=config.negligible,
        rotate_folds=config.rotate_folds,
    )


def _variant_results(
    variant: Variant, study: Study, choices: Mapping[str, Choice], extra: ExtraFigures
) -> VariantResults:
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
        last={seed: _of(figures, metrics) for seed, figures in extra.last.items()},
        untrained=None if extra.untrained is None else _of(extra.untrained, metrics),
        summary=summary,
        difference=difference,
    )


def _of(figures: Metrics, metrics: Sequence[str]) -> Metrics:
    return {name: figures[name] for name in metrics if name in figures}
