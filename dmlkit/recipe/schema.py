"""Schema of recipes: all settings of a training run, typed, frozen and checked across components."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import reduce
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from dmlkit.backbones import BackboneConfig, SmallCNN
from dmlkit.backbones.tuning import TuningConfig
from dmlkit.component import ComponentConfig, components_below, one_of
from dmlkit.datasets import DatasetConfig
from dmlkit.datasets.files.samples import samples_named
from dmlkit.errors import OptionError, UserError, first_line, out_of_memory
from dmlkit.files.yaml_tree import Key, Tree
from dmlkit.heads import HeadConfig, Linear
from dmlkit.losses import LossConfig
from dmlkit.losses.base import too_near
from dmlkit.manifolds import ManifoldConfig, Sphere
from dmlkit.manifolds.base import NEEDS_BOUNDED
from dmlkit.metrics import MapAtRConfig, MetricConfig, RecallConfig
from dmlkit.metrics.ranking.rerank import parse_rerank
from dmlkit.miners import MinerConfig
from dmlkit.optimizers import AdamWConfig, OptimizerConfig
from dmlkit.pooling import PoolingConfig
from dmlkit.recipe.faults import fault_line
from dmlkit.recipe.plugin import load_installed
from dmlkit.regularizers import RegularizerConfig
from dmlkit.samplers import Random, SamplerConfig
from dmlkit.schedules import ConstantConfig, ScheduleConfig
from dmlkit.transforms import PlainConfig, TransformConfig
from dmlkit.transforms.augmentations import AugmentationConfig
from dmlkit.transport import TransportConfig

LoggerName = Literal["tensorboard", "mlflow", "wandb"]
Copies = Literal["flip", "scales"]
Faults = Iterator[tuple[Key, str]]
"""Keys of a recipe, and what is wrong with their values."""


def _check_method(text: str) -> str:
    parse_rerank(text)
    return text


class TrainingConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Duration and settings of training."""

    epochs: PositiveInt = 20
    """Number of passes over the training images."""
    stop_after: PositiveInt | None = None
    """Number of epochs after which training ends, while the schedule of the learning rate spans ``epochs``; null trains
    all of them. ``dmlkit final`` sets it to the epoch that validation chose."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision; ``bf16`` and ``fp16`` are mixed: weights and losses stay in float32."""
    accumulate: PositiveInt = 1
    """Number of batches whose mean gradient makes one step of the optimizer; the loss is computed per batch, so pairs
    are always within a batch."""
    clip_grad_norm: PositiveFloat | None = None
    """Maximum norm of the gradient of all weights together; null does not clip."""
    clip_grad_value: PositiveFloat | None = None
    """Maximum absolute value of a gradient's coordinate; null does not clip."""
    validate_every: PositiveInt = 1
    """Number of epochs between two validations; the last epoch is always validated."""
    select_by: str = "map@r"
    """Validation metric that chooses the best checkpoint; larger is better."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay per step, e.g. 0.999, of an exponential moving average of the weights, which is validated, saved and
    exported; null uses the weights themselves."""
    compile: bool = False
    """Compile the backbone with torch.compile. EfficientNet-Lite0 takes more than a minute on a CPU and then trains no
    faster, see docs/scale.md; GPUs were not measured."""
    gradient_checkpointing: bool = False
    """Store only the inputs of the backbone's blocks for the backward pass, which recomputes the rest: the same weights
    with less memory and more time."""
    gradient_cache: PositiveInt | None = None
    """Maximum number of images that each rank embeds at a time; the backward pass embeds each chunk again. The loss
    compares the whole batch, with the memory of one chunk and more time; null embeds the batch in one pass."""
    shard_proxies: bool = False
    """Under torchrun, each rank keeps only the proxies of its share of the classes, for very many classes."""
    workers: Annotated[NonNegativeInt, Field(le=256)] | None = None
    """Number of processes that read images, at most 256; null is one per CPU core, at most 8, a share of them under
    ``study --workers``, and 0 for images in memory."""
    loggers: tuple[LoggerName, ...] = ()
    """Additional loggers of the run, each an extra of dmlkit; training continues if one fails."""

    @property
    def trained_epochs(self) -> int:
        """Number of epochs that are trained."""
        return self.stop_after or self.epochs


class EvaluationConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Techniques at test time. Validation classes choose which of them are used, none, one or both."""

    tta: Copies | None = None
    """Mean of each image and copies of it, flip or scales, as in ``eval --with``; null for none."""
    rerank: Annotated[str, AfterValidator(_check_method)] | None = None
    """Method of re-ranking with its options, as in ``eval --rerank``, e.g. ``k_reciprocal:k1=10``; null for none."""


class Recipe(BaseModel, frozen=True, extra="forbid", strict=True):
    """Settings of a training run. Use `dmlkit.recipe.file.read_recipe` to read a recipe from YAML.

    Raises:
        pydantic.ValidationError: a value has the wrong type or is out of range, or two components are incompatible.

    Example:
        >>> from dmlkit.datasets import GlyphsConfig
        >>> from dmlkit.losses import ProxyAnchor
        >>> Recipe(dataset=GlyphsConfig(), loss=ProxyAnchor.Config(margin=0.2)).manifold.name
        'sphere'
    """

    seed: NonNegativeInt = 0
    """Seed of initial weights, batches and augmentation."""
    dataset: Annotated[DatasetConfig, one_of]
    """Labeled images or vectors, and their split into training, validation and test classes."""
    transform: Annotated[TransformConfig, one_of] | None = PlainConfig()
    """Conversion of images to the backbone's input, in training and in evaluation; null for vectors."""
    backbone: Annotated[BackboneConfig, one_of] = SmallCNN.Config()
    """Network from pixels or vectors to features."""
    head: Annotated[HeadConfig, one_of] = Linear.Config()
    """Network from features to the embedding."""
    embedding_dim: PositiveInt = 128
    """Number of dimensions of an embedding, as a tangent vector."""
    manifold: Annotated[ManifoldConfig, one_of] = Sphere.Config()
    """Space of the embeddings, and their similarity."""
    loss: Annotated[LossConfig, one_of]
    """Loss that training minimizes."""
    regularizers: tuple[Annotated[RegularizerConfig, one_of], ...] = ()
    """Terms added to the loss, each with a weight."""
    sampler: Annotated[SamplerConfig, one_of] = Random.Config()
    """Choice of the images of each batch."""
    optimizer: Annotated[OptimizerConfig, one_of] = AdamWConfig()
    """Method that updates the weights from their gradients."""
    schedule: Annotated[ScheduleConfig, one_of] = ConstantConfig()
    """Change of the learning rate over the epochs."""
    training: TrainingConfig = TrainingConfig()
    """Duration and settings of training."""
    metrics: Annotated[tuple[Annotated[MetricConfig, one_of], ...], Field(min_length=1)] = (
        RecallConfig(),
        MapAtRConfig(),
    )
    """Metrics of validation and test classes, e.g. ``[recall@1, map@r, ndcg@8]``."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Techniques at test time, whose metrics are reported next to the plain ones."""

    _origins: dict[Key, str] = PrivateAttr(default_factory=dict[Key, str])

    def __eq__(self, other: object) -> bool:
        """Return whether two recipes have equal values, regardless of the files they were read from."""
        return isinstance(other, Recipe) and dict(self) == dict(other)

    def read_from(self, origins: dict[Key, str]) -> "Recipe":
        """Store the file and line of each key, for `fault`, and return the recipe."""
        object.__setattr__(self, "_origins", origins)
        return self

    def fault(self, key: Key, text: str) -> str:
        """Return an error message on a key, with file and line if the recipe was read from a file."""
        return fault_line(Tree("", origins=self._origins), key, text)

    @contextmanager
    def errors_at(self, *key: str | int) -> Generator[None]:
        """Convert errors of the component at ``key`` into errors of one line with file, line and key.

        Raises:
            UserError: the block raises an OptionError, which names its own key, or a ValueError, RuntimeError or
                MemoryError.
        """
        try:
            yield
        except OptionError as error:
            raise UserError(self.fault(tuple(error.key.split(".")), error.message)) from error
        except (ValueError, RuntimeError, MemoryError) as error:
            text = first_line(error)
            if out_of_memory(error):
                text = "needs more memory than this machine has; use a smaller model or smaller images"
            raise UserError(self.fault(key, text)) from error

    @model_validator(mode="after")
    def check_requirements(self, info: ValidationInfo) -> "Recipe":
        """Check the requirements of every component on the other components, and report all errors together."""
        if not samples_named(self.dataset.sample).has_pixels and "transform" not in self.model_fields_set:
            object.__setattr__(self, "transform", None)
        is_trained = (info.context or {}).get("is_trained", False)
        faults = list(self._samples_that_do_not_fit()) or [
            *self._unmet_requirements(is_trained=is_trained),
            *(() if is_trained else self._unrelated_points_out_of_reach()),
            *(() if is_trained else self._settings_without_effect()),
            *self._proxies_that_cannot_be_trained(),
            *(() if is_trained else self._training_that_does_not_fit()),
            *self._metrics_that_do_not_fit(),
            *self._parts_for_one_label(),
            *self._augmentation_without_views(),
            *self._techniques_that_do_not_apply(),
        ]
        if faults:
            message = "; ".join(f"{'.'.join(map(str, key))}: {text}" for key, text in faults)
            raise PydanticCustomError("requirements", "{message}", {"message": message, "faults": faults})
        return self

    def _samples_that_do_not_fit(self) -> Faults:
        kind, taken = self.dataset.sample, self.backbone.sample
        held = f"dataset {self.dataset.name} has {kind}s"
        if taken != kind:
            able = [name for name, variant in BackboneConfig.variants.items() if variant.sample == kind]
            instead = " or ".join(able) or "a plug-in"
            yield ("backbone", "name"), f"{self.backbone.name} takes {taken}s, but {held}; use {instead}"
        has_pixels = samples_named(kind).has_pixels
        if not has_pixels and self.transform is not None:
            yield ("transform",), f"got {self.transform.name}, but {held}, which are not transformed; remove it"
        if has_pixels and self.transform is None:
            yield ("transform",), f"got null, but {held}; remove the key, or set a transform"

    def _unmet_requirements(self, *, is_trained: bool) -> Faults:
        for key, component in components_below((), self):
            # it was trained so: to ask timm takes 2 s of a processor, and a teacher may be gone
            if is_trained and (component is self.backbone or isinstance(component, RegularizerConfig)):
                continue
            yield from (((*key, name), fault) for name, fault in component.faults())
            for requirement in component.requirements():
                *path, fact = requirement.key.split(".")
                for owner_key, owner in self._owners(tuple(path), fact, key):
                    choices, value = requirement.allowed, getattr(owner, fact)
                    if value in choices:
                        continue
                    needed = fact
                    if fact in type(owner).__class_vars__:  # no key: name the members that have it
                        variants = owner.variants.items()
                        choices = tuple(name for name, variant in variants if getattr(variant, fact) in choices)
                        needed, value = "name", owner.name
                    allowed = " or ".join("null" if choice is None else str(choice) for choice in choices)
                    needed = ".".join(map(str, (*owner_key, needed)))
                    yield key, f"{component.name} needs {needed} {allowed}, got {value}, because {requirement.reason}"

    def _owners(self, path: Key, fact: str, key: Key) -> list[tuple[Key, Any]]:
        """Return the components of which the one at ``key`` requires a fact, each with its key, if they have the fact.

        A component without it is refused by its name. A loss within a loss requires the fact of the innermost loss
        around it that has it; within a loss per factor, facts of the space are those of every factor.
        """
        parts: list[Any] = list(accumulate(key, _part, initial=self))  # from the recipe down to the component
        owners: list[tuple[Key, Any]] = [(path, reduce(_part, path, self))]
        if any(getattr(part, "name", None) == "per_factor" for part in parts[1:-1]):
            if path == ("manifold",):
                factors = getattr(self.manifold, "factors", ())  # of another space, the loss per factor is refused
                owners = [((*path, "factors", index), factor) for index, factor in enumerate(factors)]
            elif fact == "embedding_dim":  # the factors share it, which the built losses check
                owners = []
        if path == key[:1] == ("loss",):
            owners = [(path, part) for part in parts[1:] if hasattr(part, fact)][-1:]
        return [(owner_key, owner) for owner_key, owner in owners if hasattr(owner, fact)]

    def _unrelated_points_out_of_reach(self) -> Faults:
        terms = components_below((), (self.loss, self.regularizers))
        bounded = [term.name for _, term in terms if NEEDS_BOUNDED in term.requirements()]
        similarity = getattr(self.manifold, "similarity", "")  # a plug-in's manifold may have none
        for key, fault in too_near(bounded[0], self.manifold, similarity) if bounded else ():
            yield ("manifold", *key), fault

    def _proxies_that_cannot_be_trained(self) -> Faults:
        if self.manifold.proxies == "points" and not self.optimizer.is_riemannian:
            text = f"points need a Riemannian optimizer to stay on the manifold, got optimizer {self.optimizer.name}"
            yield ("manifold", "proxies"), text
        key, training = ("training", "shard_proxies"), self.training
        if training.shard_proxies and not self.loss.shares_classes:
            able = [name for name, variant in LossConfig.variants.items() if variant.shares_classes]
            yield key, f"{self.loss.name} does not support sharded proxies; use one of {', '.join(able)}"
        if training.shard_proxies and training.precision == "fp16":
            yield key, "got precision fp16, whose scaler skips steps per rank; use precision fp32 or bf16"

    def _training_that_does_not_fit(self) -> Faults:
        epochs, stop_after = self.training.epochs, self.training.stop_after
        if stop_after is not None and stop_after > epochs:
            yield ("training", "stop_after"), f"got {stop_after}, expected at most training.epochs, {epochs}"
        key, chosen = ("training", "select_by"), self.training.select_by
        names = [name for metric in self.metrics for name in metric.names()]
        if chosen not in names:
            yield key, f"got {chosen!r}, expected one of the recipe's metrics: {', '.join(names)}"
        if any(metric.smaller_is_better and chosen in metric.names() for metric in self.metrics):
            yield key, f"got {chosen}, of which smaller is better; expected a metric where larger is better"

    def _metrics_that_do_not_fit(self) -> Faults:
        known, seen = self.dataset.levels or self.dataset.own_levels, set[str]()  # None if only the files tell
        for index, metric in enumerate(self.metrics):
            for name in metric.names():
                if name in seen:
                    yield ("metrics", index), f"{name} is listed twice; remove one"
                seen.add(name)
            if known is None or metric.level in known or not metric.uses_levels or (metric.is_graded and known):
                continue
            text = f"unknown level {metric.level!r}; expected one of {', '.join(known)}"
            if not known:
                text = f"dataset {self.dataset.name} has no levels; set dataset.levels, or remove the metric"
            yield ("metrics", index), f"{metric.names()[0]}: {text}"

    def _parts_for_one_label(self) -> Faults:
        separator = self.dataset.label_separator
        if separator is None:
            return
        advice = {"loss": "use a loss over pairs, e.g. sup_con", "sampler": "use class_balanced or random"}
        parts: list[tuple[Key, Any]] = [(("loss",), self.loss), (("sampler",), self.sampler)]
        if terms := getattr(self.loss, "losses", ()):
            parts[:1] = [(("loss", "losses", index), loss) for index, loss in enumerate(terms)]
        parts += [(("regularizers", index), term) for index, term in enumerate(self.regularizers)]
        refused = [(key, part.name) for key, part in parts if not part.takes_several_labels]
        metrics = [(("metrics", index), config) for index, config in enumerate(self.metrics) if not config.searches]
        for key, name in [*refused, *((key, metric.names()[0]) for key, metric in metrics)]:
            instead = advice.get(str(key[0]), "remove it")
            yield key, f"{name} needs one label per image, got several (dataset.separator {separator!r}); {instead}"

    def _settings_without_effect(self) -> Faults:
        warmup, epochs = self.schedule.warmup_epochs, self.training.epochs
        if warmup > epochs:  # the learning rate of the optimizer would never be reached
            yield ("schedule", "warmup_epochs"), f"got {warmup:g}, expected at most training.epochs, {epochs}"
        loggers = self.training.loggers
        for index, name in enumerate(loggers):
            if name in loggers[:index]:
                yield ("training", "loggers", index), f"{name} is listed twice; remove one"

    def _augmentation_without_views(self) -> Faults:
        stored, transform = self.backbone.tuning.stored(), self.transform
        if stored and not stored.views and transform is not None:
            settings = {"augment": transform.augment, "training_size": transform.training_side != transform.size}
            for key in (key for key, is_given in settings.items() if is_given):
                text = "features are cached without augmentation; set backbone.tuning.feature_views, or remove this key"
                yield ("transform", key), text

    def _techniques_that_do_not_apply(self) -> Faults:
        if self.evaluation.tta and not samples_named(self.dataset.sample).has_pixels:
            yield ("evaluation", "tta"), f"got {self.evaluation.tta}, but the dataset has no images; remove this key"
        chosen = self.training.select_by
        unranked = [name for metric in self.metrics if not metric.searches for name in metric.names()]
        if self.evaluation != EvaluationConfig() and chosen in unranked:
            yield ("evaluation",), f"is chosen by training.select_by, and {chosen} ranks no gallery; use e.g. map@r"


def _part(whole: Any, name: str | int) -> Any:
    return getattr(whole, name) if isinstance(name, str) else whole[name]


FAMILIES: dict[str, type[ComponentConfig]] = {
    "datasets": DatasetConfig,
    "transforms": TransformConfig,
    "augmentations": AugmentationConfig,
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
"""Families by the name of their folder, in the order in which an image passes through them."""

load_installed()
