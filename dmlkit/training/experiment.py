"""Assembly of an experiment: all components of a recipe, built and checked together."""

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dmlkit.backbones.base import BatchNorm
from dmlkit.backbones.tuning import LastBlocksConfig
from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset, search_faults
from dmlkit.distributed.exchange import ShardedParameter
from dmlkit.errors import OptionError, UserError, counted, some_of, warn
from dmlkit.evaluation.augmented import check_copies
from dmlkit.evaluation.evaluate import check_levels
from dmlkit.loading.inputs import refuse_missing
from dmlkit.losses.base import Loss
from dmlkit.manifolds.sphere import Sphere
from dmlkit.metrics.ranking.rerank import check_rerank, parse_rerank
from dmlkit.model import EmbeddingModel, build_model, fingerprint
from dmlkit.recipe.file import dump_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.regularizers import Regularizer
from dmlkit.samplers import Hierarchical, Sampler
from dmlkit.training.gradient_checkpointing import recompute_blocks, recompute_chunks
from dmlkit.training.progress import check_loggers
from dmlkit.vectors.features import first_blocks


class WeightAverage:
    """Exponential moving average of a model's weights (``training.ema``), without running statistics of batch norms.

    Args:
        decay: share of the average that each step keeps, in (0, 1).
    """

    def __init__(self, model: EmbeddingModel, decay: float) -> None:
        frozen = model.frozen_weights()
        self.model_weights = {name: weight for name, weight in model.named_parameters() if name not in frozen}
        self.averages = self._latest()
        self.apply_update = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the weights after a step."""
        latest = self.model_weights
        self.averages = {name: average.to(latest[name].device) for name, average in self.averages.items()}
        self.apply_update(tuple(self.averages.values()), tuple(latest.values()), 0)

    def restore(self, averages: Mapping[str, Tensor], latest: Mapping[str, Tensor]) -> None:
        """Restore the averages, and load the latest weights into the model."""
        self.averages = {name: averages[name].to(weight.device) for name, weight in self.model_weights.items()}
        self._load(latest)

    def put_in_place(self) -> None:
        """Copy the averages into the model."""
        self._load(self.averages)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Copy the averages into the model while the block runs."""
        latest = self._latest()
        self.put_in_place()
        try:
            yield
        finally:
            self._load(latest)

    def _latest(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.model_weights.items()}

    @torch.no_grad()
    def _load(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self.model_weights.items():
            weight.copy_(values[name])


class Objective(nn.Module):
    """The objective to minimize: the loss plus the weighted regularizers."""

    def __init__(self, loss: Loss, regularizers: list[Regularizer], weights: list[float]) -> None:
        super().__init__()
        self.loss = loss
        self.regularizers = nn.ModuleList(regularizers)
        self.weights = weights
        self.aligned_to: str | None = None  # fingerprint of an older model in whose space a regularizer keeps this one

    @property
    def terms(self) -> dict[str, Tensor]:
        """The terms of a loss that is a sum, in the last batch; see `Sum`."""
        return getattr(self.loss, "terms", {})

    def forward(self, embeddings: Tensor, labels: Tensor, images: Tensor | None = None) -> Tensor:
        """Compute the objective of a batch, a scalar; see `Loss.forward` and `Regularizer.forward`.

        Args:
            embeddings: (B, D), or (B, 2 D) if the loss also takes the points before a neck.

        Raises:
            ValueError: a term, perhaps of a plug-in, is no scalar tensor.
        """
        total = _scalar(self.loss, self.loss(embeddings, labels))
        embeddings = embeddings[:, : self.loss.manifold.point_dim]
        for weight, regularizer in zip(self.weights, self.regularizers, strict=True):
            count: Any = regularizer.proxies_per_step
            rows = (embeddings, labels, images) if count is None else draw_proxies(self.loss, count)
            total = total + weight * _scalar(regularizer, regularizer(*rows))
        return total

    def sharded_parameters(self) -> list[ShardedParameter]:
        """Return the parameters of which this rank holds only some rows, with their names in this state dict."""
        return [sharded._replace(name=f"loss.{sharded.name}") for sharded in self.loss.sharded_parameters()]


def _scalar(term: nn.Module, value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.shape == ():
        return value
    got = list(value.shape) if isinstance(value, Tensor) else value
    raise ValueError(f"{type(term).__name__} returned {got}, expected a scalar tensor, e.g. a mean over the pairs")


def draw_proxies(loss: Any, count: int) -> tuple[Tensor, Tensor]:
    """Draw different proxies of a loss, or all in order if at most ``count``: points (N, D) and their classes (N,)."""
    proxies: Tensor = loss.proxies  # (C, d) or (C, K, d)
    every = proxies.flatten(0, -2)
    rows = torch.arange(len(every), device=every.device)
    if len(every) > count:
        rows = torch.randperm(len(every), device=every.device)[:count]
    return loss.manifold.proxy_points(every[rows]), rows // (len(every) // len(proxies))


@dataclass(frozen=True)
class Experiment:
    """The objects that a recipe describes, ready to train."""

    recipe: Recipe
    model: EmbeddingModel
    objective: Objective
    optimizer: Optimizer
    sampler: Sampler
    train: Dataset
    validation: Dataset | None
    test: Dataset | None
    average: WeightAverage | None = None

    @property
    def steps(self) -> int:
        """Number of optimizer steps per epoch; the last step may have fewer batches than the others."""
        return ceil(len(self.sampler) / self.recipe.training.accumulate)

    @cached_property
    def recipe_text(self) -> str:
        """The resolved recipe as YAML, for every checkpoint; writing it takes 8 ms."""
        return dump_recipe(self.recipe)

    @cached_property
    def frozen_pretrained(self) -> str | None:
        """Hash of the frozen pretrained weights, which replaces them in checkpoints; None where there are none.

        Computing it takes 1 s for 300 million weights.
        """
        frozen = self.model.frozen_weights() if self.recipe.backbone.is_pretrained else {}
        return fingerprint(frozen) if frozen else None


def assemble(recipe: Recipe, rank: int = 0, ranks: int = 1) -> Experiment:
    """Build every component of a recipe. Seeds torch's global generator, so equal recipes give equal weights."""
    with recipe.errors_at("training", "loggers"):
        check_loggers(recipe.training.loggers)
    with recipe.errors_at("dataset"):
        splits: dict[Split, Dataset] = {split: recipe.dataset.searched(split) for split in recipe.dataset.own_splits}
        train, validation, test = (splits.get(split) for split in ("train", "validation", "test"))
        assert train is not None
        if len(train.class_names) < 2:
            raise OptionError("dataset", "got 1 training class, expected at least 2")
        _check_unseen(recipe, train, validation, test)
        for split, dataset in splits.items():
            _check_images(recipe, split, dataset, is_first=rank == 0)
    with recipe.errors_at("metrics"):
        check_levels(recipe.metrics, train)
    with recipe.errors_at("sampler"):
        sampler = _sampler_of(recipe, train)
    if recipe.training.accumulate > len(sampler):
        message = f"got {recipe.training.accumulate}, expected at most {len(sampler)}, the number of batches per epoch"
        raise UserError(recipe.fault(("training", "accumulate"), message))
    torch.manual_seed(recipe.seed)
    with recipe.errors_at("backbone"):
        backbone = recipe.backbone.build(train.num_features)
    if recipe.training.gradient_checkpointing:
        with recipe.errors_at("training", "gradient_checkpointing"):
            recompute_blocks(backbone)
    model = build_model(recipe, train.num_features, backbone=backbone)
    blank = try_model(recipe, model, train)
    tuning = recipe.backbone.tuning
    if isinstance(tuning, LastBlocksConfig) and tuning.stored():
        with recipe.errors_at("backbone", "tuning"):
            first_blocks(recipe, model).check()
    share = sampler.batch_size // ranks
    _try_single_images(recipe, model, blank, share)
    if recipe.training.gradient_cache:
        if rank == 0 and share > recipe.training.gradient_cache:
            _warn_of_batchnorms(recipe, model)
        recompute_chunks(model, recipe.training.gradient_cache)
    loss = loss_of(recipe, model, train)
    _warn_of_late_starts(recipe, is_first=rank == 0)
    with recipe.errors_at("regularizers"):
        regularizers = [regularizer.build(model.manifold) for regularizer in recipe.regularizers]
        for regularizer in regularizers:
            regularizer.use_levels(train.levels)
    objective = Objective(loss, regularizers, [regularizer.weight for regularizer in recipe.regularizers])
    if recipe.training.shard_proxies:
        with recipe.errors_at("training", "shard_proxies"):
            objective.loss.keep_shard(rank, ranks)
    parameters = _parameters_of(recipe, model, objective)
    with recipe.errors_at("optimizer"):
        optimizer = recipe.optimizer.build(parameters, fused=recipe.training.precision != "fp16")
    average = WeightAverage(model, recipe.training.ema) if recipe.training.ema else None
    return Experiment(recipe, model, objective, optimizer, sampler, train, validation, test, average)


def loss_of(recipe: Recipe, model: EmbeddingModel, dataset: Dataset) -> Loss:
    """Return the loss of a recipe for its training images."""
    with recipe.errors_at("loss"):
        loss = recipe.loss.build(model.manifold, len(dataset.class_names))
        loss.use_members(dataset.members)
    counts = dataset.labels.bincount(minlength=len(dataset.class_names))
    for part in loss.modules():
        if isinstance(part, Loss):
            part.use_counts(counts)
    model.head.gives_before = loss.columns > model.manifold.point_dim
    return loss


def _check_unseen(recipe: Recipe, train: Dataset, validation: Dataset | None, test: Dataset | None) -> None:
    """Check that a plug-in keeps the test classes apart; those of files were checked when they were listed."""
    if test and not recipe.dataset.tests_known:
        seen = {name for part in (train, validation) if part for name in part.class_names}
        if shared := sorted(seen.intersection(test.class_names)):
            text = f"test classes are in training or validation too: {some_of(shared)}; expected unseen ones"
            raise OptionError("dataset", text)


def _check_images(recipe: Recipe, split: Split, dataset: Dataset, *, is_first: bool) -> None:
    """Check the images of a split, and techniques for them, as far as that is possible before they are read."""
    refuse_missing(dataset, recipe.dataset.on_bad_image, f"the {split} split")
    if not dataset.kind.has_angle and isinstance(recipe.manifold, Sphere.Config):
        zero = [row for row in range(len(dataset)) if not dataset.sample(row).any()]  # 0.5 s for 100 000 x 512
        if zero:
            raise OptionError(
                "dataset.embeddings",
                f"{len(zero)} of {len(dataset)} vectors are zero and have no cosine, the first is "
                f"{dataset.key(zero[0])}; remove them, or compare by distance (manifold euclidean)",
            )
    fault, notes = search_faults(dataset, split, recipe.dataset.title)
    if fault is not None:
        raise OptionError("dataset", fault)
    for note in notes if is_first else ():
        warn(note)
    if split != "train":
        check_copies(dataset, recipe, recipe.evaluation.tta)
        with recipe.errors_at("evaluation", "rerank"):
            if recipe.evaluation.rerank:
                images = len(dataset) if dataset.gallery is None else int(dataset.gallery.sum())
                check_rerank(parse_rerank(recipe.evaluation.rerank), images)


def _sampler_of(recipe: Recipe, dataset: Dataset) -> Sampler:
    members = {} if dataset.members is None else {"members": dataset.members}  # plug-ins may not take it
    options: Any = recipe.sampler
    level: str | None = options.level if isinstance(options, Hierarchical.Config) else None
    above = list(dataset.levels)[:-1]
    if level is not None and level not in above:
        known = f"expected one of {', '.join(above)}" if above else "the dataset has no levels; set dataset.levels"
        raise OptionError("sampler.level", f"got {level!r}; {known}")
    super_classes = dataset.super_classes if level is None else dataset.levels[level]
    return recipe.sampler.build(dataset.labels, recipe.seed, super_classes, dataset.groups, **members)


@torch.no_grad()
def _try_single_images(recipe: Recipe, model: EmbeddingModel, blank: Tensor, share: int) -> None:
    """Try one image in training mode, if a rank's share of a batch is one, or is split into chunks with one.

    Batch norms of a 1 x 1 map then have no variance.
    """
    if not share or share // ceil(share / (recipe.training.gradient_cache or share)) > 1:
        return
    where, batch, advice = ("training", "gradient_cache"), "a chunk of 1 image", "use larger chunks"
    if share == 1:
        where, batch, advice = ("sampler",), "a batch of 1 image per rank", "use at least 2 images per rank"
    with recipe.errors_at(*where), torch.random.fork_rng(devices=[]):
        try:
            deepcopy(model).train()(blank)
        except ValueError as error:
            raise ValueError(f"{batch} is too small for batch norms; {advice}: {error}") from error


def _warn_of_late_starts(recipe: Recipe, *, is_first: bool) -> None:
    """Warn of what starts after the last epoch: not an error, because a trial has fewer epochs than its recipe."""
    effects = {("backbone", "freeze_epochs"): "the backbone does not train"}
    if recipe.loss.name == "cross_batch_memory":
        effects["loss", "start_epoch"] = "the memory is not used"
    for (part, key), effect in effects.items():
        first, epochs = getattr(getattr(recipe, part), key), recipe.training.epochs
        if is_first and first >= epochs:
            text = f"got {first}, but the run has {counted(epochs, 'epoch')}: {effect}"
            warnings.warn(recipe.fault((part, key), text), stacklevel=3)


def _warn_of_batchnorms(recipe: Recipe, model: EmbeddingModel) -> None:
    if any(isinstance(module, BatchNorm) and module.training for module in model.modules()):
        text = (
            "batch norms compute their statistics per chunk instead of per batch, so weights differ from those of a "
            "training without chunks; backbone.freeze_batchnorm_statistics=true removes this difference"
            f"{', but not that of the neck' if recipe.head.has_neck else ''}"
        )
        warnings.warn(recipe.fault(("training", "gradient_cache"), text), stacklevel=3)


def _parameters_of(recipe: Recipe, model: EmbeddingModel, objective: Objective) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of backbone, head and loss, see `OptimizerConfig.build`."""
    shared, head = {id(parameter) for parameter in model.parameters()}, list(model.head.parameters())
    # a learnable manifold belongs to the head, although it is also part of the loss
    loss = [parameter for parameter in objective.parameters() if id(parameter) not in shared]
    frozen, tuned = recipe.backbone.freeze_epochs, model.backbone.tuned_parameters()
    outside = any(parameter.requires_grad for parameter in (*head, *loss))
    if not tuned and not outside:
        text = f"nothing trains with head {recipe.head.name} and loss {recipe.loss.name}, which have no weights; use "
        raise UserError(recipe.fault(("backbone", "tuning"), f"{text}another tuning, or e.g. the head linear"))
    if recipe.training.ema and not tuned and not any(parameter.requires_grad for parameter in head):
        text = f"got {recipe.training.ema:g}, but the model has no trainable weights to average; remove this key"
        raise UserError(recipe.fault(("training", "ema"), text))
    if frozen and not outside:
        text = f"got {frozen}, expected 0, because nothing outside the backbone trains; remove this key"
        raise UserError(recipe.fault(("backbone", "freeze_epochs"), text))
    if recipe.optimizer.layer_decay == 1:
        return {"backbone": tuned, "head": head, "loss": loss}
    text = "the backbone has no trainable weights; remove this key"
    try:
        blocks = model.backbone.tuned_blocks()
    except UserError:
        blocks, text = [], f"{recipe.backbone.name} has no separate blocks; remove this key"
    if not any(blocks):
        raise UserError(recipe.fault(("optimizer", "layer_decay"), text))
    return {f"backbone.{depth}": block for depth, block in enumerate(blocks, 1)} | {"head": head, "loss": loss}


@torch.no_grad()
def try_model(recipe: Recipe, model: EmbeddingModel, dataset: Dataset) -> Tensor:
    """Run the model on a blank input, so that a model which cannot process it fails before anything is written.

    Return the input: one sample of zeros, such as a black image (1, 3, S, S) uint8, as large as in training.
    """
    was_training = model.training
    transform, blank = recipe.transform, torch.empty(0)
    keys = {0: "backbone"} if transform is None else {transform.size: "transform.size"}
    if transform is not None:
        keys.setdefault(transform.training_side, "transform.training_size")
    for side, key in keys.items():
        with recipe.errors_at(*key.split(".")):
            blank = dataset.kind.blank(side)  # a side that is too large needs more memory than there is
            try:
                model.eval()(blank)
            except AssertionError as error:  # raised by networks of timm
                raise ValueError(f"{list(blank.shape)}: {error}") from error
    model.train(was_training)
    return blank
