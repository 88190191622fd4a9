"""Typed documents in the files of a run."""

import platform
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, PositiveInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dmlkit import __version__
from dmlkit.errors import counted
from dmlkit.files.document import Document
from dmlkit.recipe.plugin import PluginRecord, plugins_of

if TYPE_CHECKING:  # a run's progress is read without torch, which takes seconds to import
    from dmlkit.recipe.schema import Recipe

Metrics = dict[str, float]
PACKAGES = ("torchvision", "geoopt", "numpy", "pillow", "matplotlib")


class EpochRow(Document, frozen=True):
    """Line of ``metrics.jsonl`` for one finished epoch."""

    kind: ClassVar[str] = "row of metrics.jsonl"

    epoch: int
    """Number of the epoch, counted from 1."""
    loss: float
    """Mean loss over the epoch's steps."""
    terms: Metrics | None = None
    """Mean of each loss of a sum over the epoch's steps, before its weight; null for other losses."""
    lr: float
    """Learning rate at the end of the epoch, before multipliers."""
    images_per_second: float
    """Training images per second on all ranks, without validation."""
    waiting: float
    """Share of the time spent waiting for a batch."""
    seconds: float
    """Time of training and validation since the run started, without the validation of this epoch."""
    validation: Metrics | None
    """Metrics on validation classes; null if there are none or the epoch was not validated."""
    training_seconds: float | None = None
    """Time of the epoch's steps alone; null if the epoch was interrupted."""
    peak_memory_bytes: int | None = None
    """Peak memory so far in the session that finished the epoch; see `Summary.peak_memory_bytes`."""


class ScoredCheckpoint(BaseModel, frozen=True, extra="forbid"):
    """Checkpoint and its metrics."""

    epoch: int
    """Number of finished epochs."""
    validation: Metrics | None
    """Metrics on validation classes in that epoch."""
    test: Metrics | None
    """Metrics on test classes, which are not used for selection; null if every class was trained on."""


class ChosenTechniques(BaseModel, frozen=True, extra="forbid"):
    """Techniques of a recipe's ``evaluation`` that validation classes chose for the chosen checkpoint."""

    tta: Literal["flip", "scales"] | None
    """Copies of which the mean with each image is taken; null if validation prefers none."""
    rerank: str | None
    """Method of re-ranking; null if validation prefers none."""
    validation: Metrics | None
    """Metric that chooses, on validation classes, by the techniques; null without validation classes."""
    test: Metrics | None
    """Metrics on test classes with the chosen techniques; null if every class was trained on."""


def technique_name(tta: str | None, rerank: str | None) -> str:
    """Return the name of a pair of techniques.

    Example:
        >>> technique_name("flip", "k_reciprocal"), technique_name(None, None)
        ('flip, k_reciprocal', 'plain')
    """
    return ", ".join(filter(None, (tta, rerank))) or "plain"


class Basis(Document, frozen=True):
    """``basis.json``, the reference run of a model that was trained on every class (``dmlkit final``)."""

    kind: ClassVar[str] = "basis of a model of every class"

    run: str
    selected_by: str
    """Metric that chooses checkpoints."""
    checkpoint: ScoredCheckpoint
    """Checkpoint of the run after as many epochs, with its metrics."""

    def line(self) -> str:
        """Return a line that names the reference run and its test metric."""
        epoch, value = self.checkpoint.epoch, (self.checkpoint.test or {}).get(self.selected_by, float("nan"))
        run = f"{self.run} (epoch {epoch})"
        return f"its reference is {run}, with test {self.selected_by} {value:.3f}"


class PairedDifference(BaseModel, frozen=True, extra="forbid"):
    """Difference between two models on the same queries, or over runs with the same seeds.

    See `dmlkit.metrics.statistics`.
    """

    difference: float
    """Mean of this model's values minus mean of the other's."""
    low: float | None
    """Lower end of the 95 % interval; null if there are too few classes, or a single pair of runs."""
    high: float | None
    """Upper end of the 95 % interval; null as ``low``."""
    p_value: float
    """Probability of a difference at least this far from 0 if there is no true difference."""


class PretrainedFigures(BaseModel, frozen=True, extra="forbid"):
    """Metrics of the checkpoint ``pretrained``: pooled features before training, by their cosine, without head."""

    validation: Metrics | None
    """Metrics on validation classes; null if there are none."""
    test: Metrics
    """Metrics on test classes."""
    difference: dict[str, PairedDifference]
    """Chosen checkpoint minus baseline on test classes, for the metrics that are means over queries."""
    classes: int
    """Number of test classes over which the intervals are."""


class CrossFigures(BaseModel, frozen=True, extra="forbid"):
    """Retrieval of images by one model among those by another."""

    queries: str
    """Model of the queries, in words."""
    gallery: str
    """Model of the images that are searched, in words."""
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float] | None]
    """95 % bootstrap intervals over labels; null for fewer than 5."""


class Alignment(Document, frozen=True):
    """``alignment.json``, the map that ``dmlkit align`` put into the head of a run, and what it is worth."""

    kind: ClassVar[str] = "alignment of a run with older embeddings"

    embeddings: str
    """Path of the older embeddings."""
    fingerprint: str
    """That of the model that made them."""
    run: str
    """Path of the newer run, which is unchanged."""
    map: Literal["orthogonal", "linear"]
    shrinkage: float | None
    """Strength with which a linear map is pulled to the orthogonal one; null for the orthogonal one."""
    errors: dict[str, float]
    """Mean squared distance of mapped points from the older ones on the images that chose, by map and strength."""
    fitted: PositiveInt
    """Number of images that fitted the map; a third of them chose it first."""
    measured: PositiveInt
    """Number of other images, on which the figures were measured."""
    skipped: tuple[str, ...] = ()
    """One message per image that could not be read."""
    held_out: Literal["labels", "images"]
    """Whether the measured images are all of labels that fitted nothing."""
    finds: Literal["label", "image"]
    """What a query has to find: another image of its label, or, without labels, the older point of the same image."""
    figures: tuple[CrossFigures, ...]
    gain: dict[str, PairedDifference]
    """Mapped queries among older points, minus older queries among older points."""


class Summary(Document, frozen=True):
    """``summary.json``, the results of a finished run."""

    kind: ClassVar[str] = "summary of a run"

    last: ScoredCheckpoint
    """Checkpoint after all epochs."""
    best: ScoredCheckpoint | None
    """Best checkpoint on validation classes; null if there are none."""
    selected_by: str | None
    """Validation metric that chose the best checkpoint."""
    seconds: float
    """Time of training and validation, over all sessions."""
    images_per_second: float
    """Training images per second in the last epoch."""
    skipped_images: tuple[str, ...]
    """One message per image that could not be read."""
    pretrained: PretrainedFigures | None = None
    """Metrics of the backbone before the first step; null if it has no pretrained weights."""
    seconds_per_epoch: float | None = None
    """Median time per epoch of training without validation; null if every epoch was interrupted."""
    peak_memory_bytes: int | None = None
    """Peak memory of the first rank, over all sessions. On CUDA it is the memory of tensors on the device
    (``torch.cuda.max_memory_allocated``). Elsewhere it is the resident size of the process since training started (on
    macOS since the process started), without processes that read images. null if neither is available."""
    basis: Basis | None = None
    """The reference run of a model that has no test metrics of its own; see `Basis`."""
    techniques: ChosenTechniques | None = None
    """Techniques of the recipe's ``evaluation``; null if it has none."""

    @model_validator(mode="after")
    def check_selection(self) -> "Summary":
        """Check that the best checkpoint has the metric that chose it."""
        if (self.best is None) != (self.selected_by is None) or (self.best is not None and self.best_score is None):
            raise PydanticCustomError(
                "selection", "best and selected_by must both be given, and best must have the metric selected_by"
            )
        return self

    @property
    def best_score(self) -> float | None:
        """Validation metric of the best checkpoint; None if there is no best checkpoint."""
        if self.best is None or self.best.validation is None or self.selected_by is None:
            return None
        return self.best.validation.get(self.selected_by)

    @property
    def loss_message(self) -> str | None:
        """Say that validation prefers the network before training; None unless it does."""
        before = (self.pretrained.validation or {}) if self.pretrained else {}
        if self.best_score is None or self.selected_by not in before or self.best_score >= before[self.selected_by]:
            return None
        figures = f"{self.best_score:.3f} after training, {before[self.selected_by]:.3f} before"
        return f"training lost: {self.selected_by} on validation: {figures}; --checkpoint pretrained takes the latter"

    @property
    def chosen(self) -> ScoredCheckpoint:
        """Best checkpoint, or the last one if there is no best."""
        return self.best or self.last


class ClassMetrics(Document, frozen=True):
    """``test_classes.json``, the metrics of each test class by the chosen checkpoint, over the queries of the class.

    A mean over classes, weighted by their queries, is the metric of the run.
    """

    kind: ClassVar[str] = "list of the metrics of test classes"

    names: tuple[str, ...]
    """Names of the C classes with scored queries."""
    queries: tuple[PositiveInt, ...]
    """Number of scored queries, one per class."""
    metrics: dict[str, tuple[float, ...]]
    """By metric that is a mean over queries, one value per class, rounded to 9 digits."""

    @model_validator(mode="after")
    def check_lengths(self) -> "ClassMetrics":
        """Check that every list has one entry per class."""
        if {len(self.queries), *map(len, self.metrics.values())} - {len(self.names)}:
            raise PydanticCustomError("lengths", "expected one count and one value of each metric per class")
        return self


class RunClasses(Document, frozen=True):
    """``classes.json``, the names of the classes of each split when the run started; see `SplitClasses`."""

    kind: ClassVar[str] = "list of the classes of a run"

    training_classes: tuple[str, ...]
    """Names of the labels 0..C-1 of the loss's proxies."""
    validation_classes: tuple[str, ...]
    test_classes: tuple[str, ...]
    images: int
    """Number of images of the training classes."""
    known_images: dict[str, tuple[str, ...]] | None = None
    """Names of the images of each split, if test images are of the same classes as training images; null otherwise."""


class Environment(Document, frozen=True):
    """``environment.json``, the environment in which a run started. It identifies a folder as created by dmlkit."""

    kind: ClassVar[str] = "description of a run's environment"

    python: str
    platform: str
    packages: dict[str, str]
    """Versions by package, including torch and dmlkit."""
    gpu: str | None
    threads: int
    """Number of CPU threads of torch."""
    command: tuple[str, ...]
    plugins: tuple[PluginRecord, ...] = ()
    """Plug-ins that the recipe has members of."""

    @field_validator("packages")
    @classmethod
    def check_packages(cls, packages: dict[str, str]) -> dict[str, str]:
        """Check that the versions are given on which a run's speed depends."""
        for name in ("torch", "dmlkit"):
            if name not in packages:
                raise PydanticCustomError("packages", "the version of {name} is missing", {"name": name})
        return packages

    @classmethod
    def here(cls, recipe: "Recipe", device: str = "cpu") -> "Environment":
        """Return the environment of this process, for a run of a recipe on a device."""
        import torch

        kind = device.partition(":")[0]
        gpu = torch.cuda.get_device_name(device) if kind == "cuda" else "Apple GPU" if kind == "mps" else None
        return cls(
            python=platform.python_version(),
            platform=platform.platform(),
            packages={"dmlkit": __version__, "torch": torch.__version__} | {name: version(name) for name in PACKAGES},
            gpu=gpu,
            threads=torch.get_num_threads(),
            command=("dmlkit", *sys.argv[1:]),
            plugins=plugins_of(recipe),
        )

    @property
    def device(self) -> str:
        """Hardware and versions of the run in one phrase."""
        where = self.gpu or counted(self.threads, "CPU thread", "CPU threads")
        return f"{where}, torch {self.packages['torch']}, dmlkit {self.packages['dmlkit']}"
