"""What a run tells in its files, typed."""

import platform
import sys
from importlib.metadata import version
from typing import ClassVar

import torch
from pydantic import BaseModel, field_validator, model_validator
from pydantic_core import PydanticCustomError

from dmlkit import __version__
from dmlkit.files.document import Document
from dmlkit.recipe.provenance import PluginRecord, plugins_of
from dmlkit.recipe.schema import Recipe

Metrics = dict[str, float]
PACKAGES = ("torchvision", "geoopt", "lightning-fabric", "numpy", "pillow", "matplotlib")


class EpochRow(Document, frozen=True):
    """A line of ``metrics.jsonl``: one finished epoch."""

    kind: ClassVar[str] = "row of metrics.jsonl"
    version: ClassVar[int] = 2
    older: ClassVar[dict[int, tuple[str, ...]]] = {1: ()}  # told neither training_seconds nor peak_memory_bytes

    epoch: int
    """Counted from 1."""
    loss: float
    """Mean over the epoch's steps."""
    lr: float
    """Learning rate at the end of the epoch, before multipliers."""
    images_per_second: float
    """Trained on, of all ranks; validation does not count."""
    waiting: float
    """Share of the time in which there was no batch to train on."""
    seconds: float
    """Of training and validation, since the run began."""
    validation: Metrics | None
    """On validation classes; null where there are none or they were not due."""
    training_seconds: float | None = None
    """Of the epoch's steps alone; null where it was stopped in between."""
    peak_memory_bytes: int | None = None
    """See `Summary.peak_memory_bytes`; so far, in the session that finished the epoch."""


class ScoredCheckpoint(BaseModel, frozen=True, extra="forbid"):
    """A checkpoint and its figures."""

    epoch: int
    """Finished epochs."""
    validation: Metrics | None
    """On validation classes, in that epoch."""
    test: Metrics
    """On test classes, which chose nothing."""


class PairedDifference(BaseModel, frozen=True, extra="forbid"):
    """How figures of one model differ from another's on the same queries, see `dmlkit.evaluation.resampling`."""

    difference: float
    """Mean of this model's minus the other's."""
    low: float | None
    """Of the 95 % interval; null where the queries are of a single class."""
    high: float | None
    """As ``low``."""
    p_value: float
    """How probable a difference this far from 0 is where there is none."""


class UntouchedFigures(BaseModel, frozen=True, extra="forbid"):
    """Figures of the backbone as its weights came: pooled features, compared by their cosine, without the head."""

    validation: Metrics | None
    """On validation classes; null where there are none."""
    test: Metrics
    """On test classes."""
    difference: dict[str, PairedDifference]
    """On test classes, of the chosen checkpoint minus these, for the metrics that are made of single queries."""


class Summary(Document, frozen=True):
    """``summary.json``: what a finished run came to."""

    kind: ClassVar[str] = "summary of a run"
    version: ClassVar[int] = 2
    older: ClassVar[dict[int, tuple[str, ...]]] = {1: ()}  # told neither what it cost nor the untouched figures

    last: ScoredCheckpoint
    """After all epochs."""
    best: ScoredCheckpoint | None
    """The best on validation classes; null where there are none."""
    selected_by: str | None
    """The validation metric that chose it."""
    seconds: float
    """Of training and validation, over all sessions."""
    images_per_second: float
    """Of the last epoch."""
    skipped_images: tuple[str, ...]
    """One message per image that could not be read."""
    untouched: UntouchedFigures | None = None
    """Of the backbone before the first step; null where it has no pretrained weights."""
    seconds_per_epoch: float | None = None
    """Median over epochs, of training alone without validation; null where every epoch was stopped in between."""
    peak_memory_bytes: int | None = None
    """Of the first rank, over all sessions. On CUDA what tensors of the training took at most on its device
    (``torch.cuda.max_memory_allocated``); elsewhere the largest resident size of its process since the training
    began (on macOS since the process did), without those that read images; null where neither is told."""

    @model_validator(mode="after")
    def check_selection(self) -> "Summary":
        """Make sure that the best checkpoint has the figure that chose it."""
        if (self.best is None) != (self.selected_by is None) or (self.best is not None and self.best_score is None):
            raise PydanticCustomError("selection", "best and selected_by do not belong together")
        return self

    @property
    def best_score(self) -> float | None:
        """What chose the best checkpoint; none where nothing was chosen."""
        if self.best is None or self.best.validation is None or self.selected_by is None:
            return None
        return self.best.validation.get(self.selected_by)

    @property
    def chosen(self) -> ScoredCheckpoint:
        """The best checkpoint, or the last where none was chosen."""
        return self.best or self.last


class TrainingClasses(Document, frozen=True):
    """``classes.json``: what the labels of the loss's proxies mean."""

    kind: ClassVar[str] = "list of training classes"

    training_classes: tuple[str, ...]
    """Names, of the labels 0..C-1."""


class Environment(Document, frozen=True):
    """``environment.json``: what a run was started on. Its presence tells that dmlkit made the folder."""

    kind: ClassVar[str] = "description of a run's environment"
    version: ClassVar[int] = 2  # 1 had no plug-ins
    older: ClassVar[dict[int, tuple[str, ...]]] = {1: ()}

    python: str
    platform: str
    packages: dict[str, str]
    """Versions, torch's and dmlkit's own among them."""
    gpu: str | None
    threads: int
    """Of torch, on the CPU."""
    command: tuple[str, ...]
    plugins: tuple[PluginRecord, ...] = ()
    """Those that the recipe has members of."""

    @field_validator("packages")
    @classmethod
    def check_packages(cls, packages: dict[str, str]) -> dict[str, str]:
        """Make sure that torch's version is told, which a run's speed depends on."""
        if "torch" not in packages:
            raise PydanticCustomError("packages", "torch is missing")
        return packages

    @classmethod
    def here(cls, recipe: Recipe) -> "Environment":
        """This process's, for a run of a recipe."""
        return cls(
            python=platform.python_version(),
            platform=platform.platform(),
            packages={"dmlkit": __version__, "torch": torch.__version__} | {name: version(name) for name in PACKAGES},
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            threads=torch.get_num_threads(),
            command=("dmlkit", *sys.argv[1:]),
            plugins=plugins_of(recipe),
        )

    @property
    def device(self) -> str:
        """What computed, and with which versions, in one phrase."""
        where = self.gpu or f"{self.threads} CPU thread(s)"
        return f"{where}, torch {self.packages['torch']}, dmlkit {self.packages.get('dmlkit', '0.1.0')}"
