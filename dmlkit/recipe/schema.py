"""The recipe: everything that decides a training run, typed, frozen and checked across its components."""

from collections.abc import Iterator
from functools import reduce
from typing import Annotated

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, PrivateAttr, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from dmlkit.backbones import BackboneConfig, SmallCNNConfig
from dmlkit.backbones.tuning import TuningConfig
from dmlkit.component import ComponentConfig, components_below, one_of
from dmlkit.datasets import DatasetConfig
from dmlkit.heads import HeadConfig, LinearConfig
from dmlkit.losses import LossConfig
from dmlkit.losses.checks.similarity import NEEDS_BOUNDED, too_curved
from dmlkit.manifolds import LorentzConfig, ManifoldConfig, PoincareConfig, SphereConfig
from dmlkit.metrics import MapAtRConfig, MetricConfig, RecallConfig
from dmlkit.miners import MinerConfig
from dmlkit.optimizers import AdamWConfig, OptimizerConfig
from dmlkit.pooling import PoolingConfig
from dmlkit.recipe.plugin import load_installed
from dmlkit.recipe.training import TrainingConfig
from dmlkit.regularizers import RegularizerConfig
from dmlkit.samplers import RandomConfig, SamplerConfig
from dmlkit.schedules import ConstantConfig, ScheduleConfig
from dmlkit.transforms import PlainConfig, TransformConfig
from dmlkit.transport import TransportConfig


class Recipe(BaseModel, frozen=True, extra="forbid", strict=True):
    """One training run. Read one from YAML with `dmlkit.recipe.file.read_recipe`.

    Raises:
        pydantic.ValidationError: a value is of the wrong type or out of range, or two components do not fit together.

    Example:
        >>> from dmlkit.datasets import GlyphsConfig
        >>> from dmlkit.losses import ProxyAnchorConfig
        >>> Recipe(dataset=GlyphsConfig(), loss=ProxyAnchorConfig(margin=0.2)).manifold.name
        'sphere'
    """

    seed: NonNegativeInt = 0
    """Decides initial weights, batches and augmentation."""
    dataset: Annotated[DatasetConfig, one_of]
    """Labelled images or vectors, and which of them train, validate and test."""
    transform: Annotated[TransformConfig, one_of] | None = PlainConfig()
    """From an image to the pixels that the backbone takes, in training and in evaluation; null for vectors."""
    backbone: Annotated[BackboneConfig, one_of] = SmallCNNConfig()
    """From pixels, or vectors, to features."""
    head: Annotated[HeadConfig, one_of] = LinearConfig()
    """From features to the embedding."""
    embedding_dim: PositiveInt = 128
    """Dimensions of an embedding, as a tangent vector."""
    manifold: Annotated[ManifoldConfig, one_of] = SphereConfig()
    """The space that embeddings lie in, and how alike two of them are."""
    loss: Annotated[LossConfig, one_of]
    """What training minimizes."""
    regularizers: tuple[Annotated[RegularizerConfig, one_of], ...] = ()
    """Terms beside the loss, each with a weight."""
    sampler: Annotated[SamplerConfig, one_of] = RandomConfig()
    """Which images share a batch."""
    optimizer: Annotated[OptimizerConfig, one_of] = AdamWConfig()
    """How weights follow their gradients."""
    schedule: Annotated[ScheduleConfig, one_of] = ConstantConfig()
    """How the learning rate goes on over the epochs."""
    training: TrainingConfig = TrainingConfig()
    """How long and how to train."""
    metrics: Annotated[tuple[Annotated[MetricConfig, one_of], ...], Field(min_length=1)] = (
        RecallConfig(),
        MapAtRConfig(),
    )
    """What validation and test classes are scored by, e.g. ``[recall@1, map@r, ndcg@8]``."""

    _origins: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict[tuple[str | int, ...], str])

    def __eq__(self, other: object) -> bool:
        """Equal recipes say the same, wherever they were read."""
        return isinstance(other, Recipe) and dict(self) == dict(other)

    def read_from(self, origins: dict[tuple[str | int, ...], str]) -> "Recipe":
        """The recipe with the file and line that each key came from, for `fault`."""
        object.__setattr__(self, "_origins", origins)
        return self

    def fault(self, key: tuple[str | int, ...], text: str) -> str:
        """What is wrong at a key, with its file and line where the recipe was read from one."""
        place = key
        while place and place not in self._origins:
            place = place[:-1]
        where = self._origins.get(place)
        return f"{where}: {'.'.join(map(str, key))}: {text}" if where else f"{'.'.join(map(str, key))}: {text}"

    @model_validator(mode="after")
    def check_requirements(self, info: ValidationInfo) -> "Recipe":
        """Hold every component's requirements against the other components; all faults at once."""
        if self.dataset.sample == "vector" and "transform" not in self.model_fields_set:
            object.__setattr__(self, "transform", None)
        faults = list(self._samples_that_do_not_fit()) or [
            *self._unmet_requirements(),
            *(() if (info.context or {}).get("is_trained") else self._unrelated_points_out_of_reach()),
            *self._proxies_without_riemannian_optimizer(),
            *self._selection_by_unknown_metric(),
            *self._figures_given_twice(),
            *self._proxies_that_cannot_be_shared_out(),
        ]
        if faults:
            message = "; ".join(f"{'.'.join(map(str, key))}: {text}" for key, text in faults)
            raise PydanticCustomError("requirements", "{message}", {"message": message, "faults": faults})
        return self

    def _samples_that_do_not_fit(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        kind, taken = self.dataset.sample, self.backbone.sample
        held = f"dataset {self.dataset.name} holds {kind}s"
        if taken != kind:
            able = [name for name, variant in sorted(BackboneConfig.variants.items()) if variant.sample == kind]
            yield ("backbone", "name"), f"{self.backbone.name} takes {taken}s, but {held}; expected {' or '.join(able)}"
        if kind == "vector" and self.transform is not None:
            yield ("transform",), f"got {self.transform.name}, but {held}, which are not transformed; leave it out"
        if kind == "image" and self.transform is None:
            yield ("transform",), f"got null, but {held}; leave the key out, or name a transform"

    def _unmet_requirements(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        for key, component in components_below((), self):
            for requirement in component.requirements():
                value = reduce(getattr, requirement.key.split("."), self)
                if value not in requirement.allowed:
                    allowed = " or ".join("null" if choice is None else str(choice) for choice in requirement.allowed)
                    yield (
                        key,
                        f"{component.name} needs {requirement.key} {allowed}, got {value}, "
                        f"because {requirement.reason}",
                    )

    def _unrelated_points_out_of_reach(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        manifold, losses = self.manifold, [component for _, component in components_below(("loss",), self.loss)]
        bounded = [loss.name for loss in losses if NEEDS_BOUNDED in loss.requirements()]
        if isinstance(manifold, PoincareConfig | LorentzConfig) and bounded:
            fault = too_curved(bounded[0], manifold.curvature, manifold.similarity)
            if fault:
                yield ("manifold", "curvature"), fault

    def _proxies_without_riemannian_optimizer(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        if self.manifold.proxies == "points" and not self.optimizer.name.startswith("riemannian"):
            text = f"points need a Riemannian optimizer to stay on the manifold, got optimizer {self.optimizer.name}"
            yield ("manifold", "proxies"), text

    def _selection_by_unknown_metric(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        names = [name for metric in self.metrics for name in metric.names()]
        if self.training.select_by not in names:
            yield (
                ("training", "select_by"),
                f"got {self.training.select_by!r}, expected one of the recipe's metrics: {', '.join(names)}",
            )
        if any(metric.smaller_is_better and self.training.select_by in metric.names() for metric in self.metrics):
            yield ("training", "select_by"), f"less of {self.training.select_by} is better; expected the reverse"

    def _figures_given_twice(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        seen: set[str] = set()
        for index, metric in enumerate(self.metrics):
            for name in metric.names():
                if name in seen:
                    yield ("metrics", index), f"{name} is given twice; each figure has one name"
                seen.add(name)

    def _proxies_that_cannot_be_shared_out(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        if not self.training.shard_proxies:
            return
        key = ("training", "shard_proxies")
        if not self.loss.shares_classes:
            able = [name for name, variant in sorted(LossConfig.variants.items()) if variant.shares_classes]
            yield key, f"{self.loss.name} cannot share out its proxies; these can: {', '.join(able)}"
        if self.training.precision == "fp16":
            yield (key, "got precision fp16, expected fp32 or bf16: its scaler skips a step by what one rank sees")


FAMILIES: dict[str, type[ComponentConfig]] = {
    "datasets": DatasetConfig,
    "transforms": TransformConfig,
    "samplers": SamplerConfig,
    "backbones": BackboneConfig,
    "tuning": TuningConfig,
    "pooling": PoolingConfig,
    "heads": HeadConfig,
    "manifolds": ManifoldConfig,
    "losses": LossConfig,
    "miners": MinerConfig,
    "transport": TransportConfig,
    "regularizers": RegularizerConfig,
    "optimizers": OptimizerConfig,
    "schedules": ScheduleConfig,
    "metrics": MetricConfig,
}
"""The families by the name of their folder, in the order in which an image meets them."""

load_installed()
