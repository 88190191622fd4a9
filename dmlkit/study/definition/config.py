"""What a study is: its file, typed, and the recipes that follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat

from dmlkit.datasets.base import FOLDS
from dmlkit.recipe.schema import Recipe
from dmlkit.study.protocol import METRICS, ProtocolName

Values = Annotated[tuple[Any, ...], Field(min_length=1)]
FIGURES: dict[ProtocolName, tuple[str, ...]] = {
    "official": ("recall@1", "map@r"),
    "reality_check": tuple(
        f"{kind} {name}" for kind in ("separated", "concatenated") for metric in METRICS for name in metric.names()
    ),
}
"""What is reported unless the study says otherwise; of the Reality Check there is nothing else."""


class Expectation(BaseModel, frozen=True, extra="forbid", strict=True):
    """One statement of a claim: a variant is better than another one, by a metric of which more is better."""

    better: str
    """The variant that is said to be better."""
    than: str
    """The variant that it is compared with."""
    metric: str
    """Of which more is better."""
    paper: str | None = None
    """That says so, in a word, for ``dmlkit report --paper``."""


class VariantConfig(BaseModel, frozen=True, extra="allow", strict=True):
    """One method of a study: every other key is a key of the recipe, dotted, with its value."""

    recipe: str | None = None
    """A recipe of its own instead of the study's."""
    tune: dict[str, Values] | None = None
    """Values of its own to choose from instead of the study's."""


class MethodsConfig(BaseModel, frozen=True, strict=True):
    """What of a study says what is compared."""

    recipe: str
    """What every variant starts from; relative to the study's file."""
    overrides: dict[str, Any] = {}
    """Keys of the recipe, dotted, that are changed in every variant."""
    grid: dict[str, Values] | None = None
    """Values of recipe keys; every combination is a variant."""
    variants: dict[str, VariantConfig] | None = None
    """Instead of a grid: variants by name."""
    tune: dict[str, Values] = {}
    """Values of recipe keys to choose from: each combination is trained with every seed of ``tune_seeds``, and the
    best on validation classes is taken. Every variant gets as many combinations as any other."""


class StudyConfig(MethodsConfig, frozen=True, extra="forbid"):
    """A study's file: which claim is held against which runs."""

    claim: str
    """What is claimed, in one line; the first key of the file."""
    paper: str | None = None
    """That makes the claim."""
    table: str | None = None
    """Of the paper, where the claim is."""
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    """One run of every variant a seed. More may be added later."""
    tune_seeds: tuple[NonNegativeInt, ...] = ()
    """Seeds that choose among the values of ``tune``, by the mean over them; by default the first of ``seeds``."""
    extend: Annotated[int, Field(ge=0, le=50)] = 0
    """How many values each variant may add to ``tune``, one after another, where the best lies at the grid's edge."""
    more_seeds: Annotated[int, Field(ge=0, le=50)] = 0
    """How many seeds may be added to variants of which a statement is not separable yet."""
    negligible: PositiveFloat | None = None
    """A difference that nobody would act on; a statement whose whole interval is within it is decided, too."""
    rotate_folds: bool = False
    """Seed s validates on fold s mod 4, with ``dataset.split: reality_check``: seeds choose by other classes."""
    protocol: ProtocolName = "official"
    """How a run is split and scored."""
    metrics: tuple[str, ...] = ()
    """What is measured and reported; see `FIGURES`."""
    reference: str | None = None
    """The variant that the others are compared with; by default the first."""
    expect: tuple[Expectation, ...] = ()
    """The claim in figures; each statement gets a verdict."""

    def reported(self) -> tuple[str, ...]:
        """The names of the figures in tables and verdicts."""
        return self.metrics or FIGURES[self.protocol]


@dataclass(frozen=True)
class Candidate:
    """A variant's recipe, with one choice of the values that are tuned.

    Args:
        label: of the choice; empty where nothing is tuned.
        recipe: with the study's metrics; its seed is the study's first.
        values: of the keys that are tuned.
    """

    label: str
    recipe: Recipe
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Variant:
    """A method under comparison: one candidate, or several to choose from on validation classes."""

    name: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Axis:
    """What a study sweeps, where that is one number.

    Args:
        key: of the recipe.
        values: one a variant, in their order.
    """

    key: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Study:
    """A study with all its recipes.

    Args:
        config: the file.
        reference: the name of the variant that the others are compared with.
        variants: what is compared.
        axis: what is swept, if it is one number.
    """

    config: StudyConfig
    reference: str
    variants: tuple[Variant, ...]
    axis: Axis | None

    @property
    def is_tuned(self) -> bool:
        """Whether there are values to choose from."""
        return any(len(variant.candidates) > 1 for variant in self.variants)

    @property
    def first_seeds(self) -> tuple[int, ...]:
        """The seeds that every candidate is trained with: those that choose, or all where there is no choice."""
        if not self.is_tuned:
            return self.config.seeds
        return self.config.tune_seeds or self.config.seeds[:1]

    @property
    def later_seeds(self) -> tuple[int, ...]:
        """The seeds that only the chosen candidates are trained with."""
        return tuple(seed for seed in self.config.seeds if seed not in self.first_seeds)

    @property
    def num_runs(self) -> int:
        """The trainings that are certain; a repeat of the Reality Check counts as one. No run is trained twice."""
        return sum(map(self._runs_of, self.variants))

    @property
    def most_added_runs(self) -> int:
        """How many more there may be: beyond the edges of grids, and with seeds that are added."""
        named = {name for one in self.config.expect for name in (one.better, one.than)}
        beyond = self.config.extend * len(self.first_seeds) * len(self.variants) if self.is_tuned else 0
        return beyond + self.config.more_seeds * len(named)

    @property
    def models_per_run(self) -> int:
        """The Reality Check trains one model a fold."""
        return FOLDS if self.config.protocol == "reality_check" else 1

    def epochs_per_run(self, recipe: Recipe) -> int:
        """Epochs of all models of a run."""
        return recipe.training.epochs * self.models_per_run

    @property
    def num_epochs(self) -> int:
        """Epochs of those."""
        return sum(
            self.epochs_per_run(variant.candidates[0].recipe) * self._runs_of(variant) for variant in self.variants
        )

    def _runs_of(self, variant: Variant) -> int:
        return len(variant.candidates) * len(self.first_seeds) + len(self.later_seeds)

    def record(self) -> dict[str, Any]:
        """Everything that the study's figures depend on, as plain data."""
        config = self.config
        return {
            "claim": config.claim,
            "paper": config.paper,
            "table": config.table,
            "protocol": config.protocol,
            "metrics": list(config.reported()),
            "seeds": list(config.seeds),
            "tune_seeds": list(config.tune_seeds),
            "extend": config.extend,
            "more_seeds": config.more_seeds,
            "negligible": config.negligible,
            "rotate_folds": config.rotate_folds,
            "reference": self.reference,
            "expect": [expectation.model_dump(exclude_none=True) for expectation in config.expect],
            "variants": {
                variant.name: {
                    candidate.label: candidate.recipe.model_dump(mode="json", exclude={"seed"})
                    for candidate in variant.candidates
                }
                for variant in self.variants
            },
        }
