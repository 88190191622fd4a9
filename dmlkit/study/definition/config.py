"""Types of a study: its file, and the recipes that follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field

from dmlkit.recipe.schema import Recipe
from dmlkit.study.protocol import METRICS
from dmlkit.study.record import ProtocolName, StudyRecord, StudySettings

Values = Annotated[tuple[Any, ...], Field(min_length=1)]
FIGURES: dict[ProtocolName, tuple[str, ...]] = {
    "official": ("recall@1", "map@r"),
    "reality_check": tuple(
        f"{kind} {name}" for kind in ("separated", "concatenated") for metric in METRICS for name in metric.names()
    ),
}
"""Figures that are reported by default; the Reality Check has no others."""


class Expectation(BaseModel, frozen=True, extra="forbid", strict=True):
    """Statement of a claim: one variant is better than another one, by a metric of which larger is better."""

    better: str
    """Variant that is claimed to be better."""
    than: str
    """Variant with which it is compared."""
    metric: str
    """Metric of the comparison; larger must be better. It decides whether more seeds are needed. A statement by
    recall@1 or map@r also gets a verdict by the other one if the study reports both."""
    paper: str | None = None
    """Short name of the paper that makes the statement, for ``dmlkit report --paper``."""


class VariantConfig(BaseModel, frozen=True, extra="allow", strict=True):
    """Method of a study; every other key is a dotted key of the recipe with its value."""

    recipe: str | None = None
    """Recipe of this variant instead of the study's."""
    tune: dict[str, Values] | None = None
    """Values to tune over instead of the study's."""


class MethodsConfig(BaseModel, frozen=True, strict=True):
    """The part of a study's file that defines the methods."""

    recipe: str
    """Recipe from which every variant starts: a path relative to the study's file, or the name of one of dmlkit's."""
    overrides: dict[str, Any] = {}
    """Dotted keys of the recipe that are changed in every variant."""
    grid: dict[str, Values] | None = None
    """Values of recipe keys; each combination is a variant."""
    variants: dict[str, VariantConfig] | None = None
    """Variants by name, instead of a grid."""
    tune: dict[str, Values] = {}
    """Values of recipe keys to tune over: each combination is trained with every seed of ``tune_seeds``, and the best
    one on validation classes is chosen. Every variant must have the same number of combinations."""


class StudyConfig(StudySettings, MethodsConfig, frozen=True, extra="forbid"):
    """File of a study: a claim, and the runs that test it."""

    metrics: tuple[str, ...] = ()
    """Figures to report. Default: see `FIGURES`."""
    reference: str = ""
    """Variant with which the others are compared. Default: the first."""
    extend: Annotated[int, Field(ge=0, le=50)] = 0
    """Number of values that each variant adds to ``tune``, one by one, each a step from the best one that has one."""
    expect: tuple[Expectation, ...] = ()
    """Statements of the claim; each gets a verdict."""


@dataclass(frozen=True)
class Candidate:
    """Recipe of a variant with one choice of the tuned values."""

    label: str  # of the choice; empty if nothing is tuned
    recipe: Recipe  # with the study's metrics and its first seed
    values: Mapping[str, Any]  # of the tuned keys


@dataclass(frozen=True)
class Variant:
    """Method of the comparison: one candidate, or several of which validation classes choose one."""

    name: str
    candidates: tuple[Candidate, ...]


class Axis(BaseModel, frozen=True, extra="forbid"):
    """Numeric key that a study sweeps."""

    key: str  # of the recipe
    values: tuple[int | float, ...]  # one value per variant, in their order


@dataclass(frozen=True)
class Study:
    """Study with all its recipes."""

    config: StudyConfig  # with its defaults
    variants: tuple[Variant, ...]
    axis: Axis | None  # the numeric key that is swept, if there is one

    @property
    def is_tuned(self) -> bool:
        """Whether values are tuned."""
        return any(len(variant.candidates) > 1 for variant in self.variants)

    @property
    def first_seeds(self) -> tuple[int, ...]:
        """Seeds that train every candidate."""
        return self.config.first_seeds(is_tuned=self.is_tuned)

    @property
    def later_seeds(self) -> tuple[int, ...]:
        """Seeds that train only the chosen candidates."""
        return tuple(seed for seed in self.config.seeds if seed not in self.first_seeds)

    @property
    def num_runs(self) -> int:
        """Number of runs that are certain; a repeat of the Reality Check counts as one run."""
        first, later = len(self.first_seeds), len(self.later_seeds)
        return sum(len(variant.candidates) * first + later for variant in self.variants)

    @property
    def most_added_runs(self) -> int:
        """Largest number of runs that extended grids and added seeds may add."""
        named = {name for expectation in self.config.expect for name in (expectation.better, expectation.than)}
        beyond = self.config.extend * len(self.first_seeds) * len(self.variants) if self.is_tuned else 0
        return beyond + self.config.more_seeds * len(named)

    def epochs_per_run(self, recipe: Recipe) -> int:
        """Return the number of epochs of all models of a run."""
        return recipe.training.trained_epochs * self.config.models_per_run

    @property
    def num_epochs(self) -> int:
        """Number of epochs of the runs that are certain."""
        first, later = len(self.first_seeds), len(self.later_seeds)  # the latter with a candidate that is not known yet
        return sum(
            self.epochs_per_run(candidate.recipe) * (first + later * (candidate is variant.candidates[0]))
            for variant in self.variants
            for candidate in variant.candidates
        )

    def record(self, command: str) -> StudyRecord:
        """Return everything on which the study's figures depend, and the command that repeats it."""
        return StudyRecord(
            **self.config.model_dump(exclude={*MethodsConfig.model_fields, "expect"}),
            command=command,
            expect=tuple(expectation.model_dump(exclude_none=True) for expectation in self.config.expect),
            variants={
                variant.name: {
                    candidate.label: candidate.recipe.model_dump(mode="json", exclude={"seed"})
                    for candidate in variant.candidates
                }
                for variant in self.variants
            },
        )
