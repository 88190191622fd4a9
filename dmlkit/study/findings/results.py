"""Results of a study as a document: figures, intervals, paired differences and verdicts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, Field

from dmlkit.files.document import Document
from dmlkit.run_folder.documents import Environment, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.definition.config import Axis, Study
from dmlkit.study.findings.verdicts import JudgedStatement, VariantResults, by_both_figures, differences, judge
from dmlkit.study.record import StudySettings


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
    study: Study, variants: Mapping[str, VariantResults], cost: Cost, command: str, failed: Mapping[str, str]
) -> StudyResults:
    """Add paired differences and verdicts to the results of variants.

    Variants without a complete run are omitted, and so are statements without a pair of runs.
    """
    config, axis, reference = study.config, study.axis, variants.get(study.reference)
    statements = by_both_figures(config.expect, config.reported())
    names = [variant.name for variant in study.variants]
    kept = [index for index, name in enumerate(names) if name in variants]
    lacks = {
        name: tuple(seed for seed in config.seeds if name not in variants or seed not in variants[name].runs)
        for name in names
    }
    compared = {
        name: one.model_copy(update={"difference": differences(one, reference, config.reported())})
        if reference and name != study.reference
        else one
        for name, one in variants.items()
    }
    return StudyResults(
        **config.model_dump(include={*StudySettings.model_fields} - {"metrics", "reference"}),
        metrics=config.reported(),
        reference=study.reference,
        axis=axis and axis.model_copy(update={"values": tuple(axis.values[index] for index in kept)}),
        verdicts=judge(statements, compared, len(config.seeds), config.more_seeds, config.negligible),
        variants=compared,
        cost=cost,
        command=command,
        missing={name: seeds for name, seeds in lacks.items() if seeds},
        failed=dict(failed),
    )
