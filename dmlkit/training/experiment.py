"""The one place where the components of a recipe meet."""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.class_shard import ShardedParameter
from dmlkit.errors import UserError
from dmlkit.loading.cache import images_of_split
from dmlkit.losses.base import Loss
from dmlkit.manifolds.sphere import SphereConfig
from dmlkit.model import EmbeddingModel, build_model, fingerprint
from dmlkit.recipe.schema import Recipe
from dmlkit.regularizers import Regularizer
from dmlkit.samplers.base import Sampler
from dmlkit.training.gradient_checkpointing import recompute_blocks
from dmlkit.training.loggers import check_loggers


class WeightAverage:
    """What ``training.ema`` keeps of a model's weights; running statistics of batch norms stay the model's own.

    Args:
        model: whose weights; those that its tuning leaves as they were have no average.
        decay: the share of the average that each step leaves, in (0, 1).

    Example:
        >>> from dmlkit.recipe import parse_recipe
        >>> from dmlkit.model import build_model
        >>> model = build_model(parse_recipe("{dataset: {name: glyphs}, loss: {name: triplet}}", "recipe.yaml"))
        >>> average = WeightAverage(model, 0.75)
        >>> _ = model.head.linear.bias.data.fill_(4.0)
        >>> average.update()
        >>> average.weights()["head.linear.bias"][:2]
        tensor([1., 1.])
    """

    def __init__(self, model: EmbeddingModel, decay: float) -> None:
        frozen = model.frozen_weights()
        self.model_weights = {name: weight for name, weight in model.named_parameters() if name not in frozen}
        self.averages = [weight.detach().clone() for weight in self.model_weights.values()]
        self.take_in = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of a step."""
        latest = list(self.model_weights.values())
        self.averages = [old.to(new.device) for old, new in zip(self.averages, latest, strict=True)]
        self.take_in(tuple(self.averages), tuple(latest), 0)

    def weights(self) -> dict[str, Tensor]:
        """The averages by the names of the model's state dict."""
        return dict(zip(self.model_weights, self.averages, strict=True))

    @torch.no_grad()
    def restore(self, averages: Mapping[str, Tensor], latest: Mapping[str, Tensor]) -> None:
        """Go on from averages, and from the latest weights, which the model takes."""
        self.averages = [averages[name].to(weight.device) for name, weight in self.model_weights.items()]
        for name, weight in self.model_weights.items():
            weight.copy_(latest[name])

    @torch.no_grad()
    def put_in_place(self) -> None:
        """Give the averages to the model."""
        for weight, average in zip(self.model_weights.values(), self.averages, strict=True):
            weight.copy_(average)

    @contextmanager
    def in_place(self) -> Generator[None]:
        """The model has the averages while the block runs."""
        latest = [weight.detach().clone() for weight in self.model_weights.values()]
        self.put_in_place()
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, own in zip(self.model_weights.values(), latest, strict=True):
                    weight.copy_(own)


class Objective(nn.Module):
    """What is minimized: the loss plus the weighted regularizers.

    Args:
        loss: the loss.
        regularizers: terms to add.
        weights: one for each term.
    """

    def __init__(self, loss: Loss, regularizers: list[Regularizer], weights: list[float]) -> None:
        super().__init__()
        self.loss = loss
        self.regularizers = nn.ModuleList(regularizers)
        self.weights = weights

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Points (B, D) and labels (B,) int64 -> scalar."""
        total = self.loss(embeddings, labels)
        for weight, regularizer in zip(self.weights, self.regularizers, strict=True):
            total = total + weight * regularizer(embeddings, labels)
        return total

    def sharded_parameters(self) -> list[ShardedParameter]:
        """The parameters of which this rank holds some rows, by their names in this state dict."""
        return [sharded._replace(name=f"loss.{sharded.name}") for sharded in self.loss.sharded_parameters()]


@dataclass(frozen=True)
class Experiment:
    """The running things that a recipe describes."""

    recipe: Recipe
    model: EmbeddingModel
    objective: Objective
    optimizer: Optimizer
    sampler: Sampler
    train: Dataset
    validation: Dataset | None
    average: WeightAverage | None = None

    @property
    def steps(self) -> int:
        """Steps of the optimizer in an epoch; the last one may be of fewer batches than the others."""
        return ceil(len(self.sampler) / self.recipe.training.accumulate)

    def averaged(self) -> AbstractContextManager[None]:
        """While the block runs the model has the weights that it is judged by: their average, where one is kept."""
        return self.average.in_place() if self.average else nullcontext()

    @cached_property
    def frozen_pretrained(self) -> str | None:
        """The hash of the pretrained weights that do not train, which stands for them in checkpoints; None where there
        are none. It takes a second for 300 million of them."""
        frozen = self.model.frozen_weights() if self.recipe.backbone.is_pretrained else {}
        return fingerprint(frozen) if frozen else None


def assemble(recipe: Recipe, rank: int = 0, ranks: int = 1) -> Experiment:
    """Build every component of a recipe. Seeds torch's global generator: equal recipes give equal weights.

    Args:
        recipe: what to build.
        rank: this one, which keeps its share of the proxies where the recipe shares them out.
        ranks: how many there are.

    Raises:
        UserError: the data is missing or does not fit the recipe.
    """
    with faults_of(recipe, "training", "loggers"):
        check_loggers(recipe.training.loggers)
    with faults_of(recipe, "dataset"):
        train = images_of_split(recipe.dataset, "train")
        validation = images_of_split(recipe.dataset, "validation") if recipe.dataset.validates else None
        if len(train.class_names) < 2:
            raise UserError("dataset: 1 class to train on; expected at least 2, to tell apart")
        for dataset in (train, validation):
            if dataset is not None and dataset.num_features is not None and isinstance(recipe.manifold, SphereConfig):
                refuse_zero_vectors(dataset)
    with faults_of(recipe, "sampler"):
        sampler = recipe.sampler.build(train.labels, recipe.seed, train.super_classes, train.groups)
    if recipe.training.accumulate > len(sampler):
        told = f"got {recipe.training.accumulate}, expected at most the {len(sampler)} batches of an epoch"
        raise UserError(recipe.fault(("training", "accumulate"), told))
    torch.manual_seed(recipe.seed)
    with faults_of(recipe, "backbone"):
        backbone = recipe.backbone.build(train.num_features)
    if recipe.training.gradient_checkpointing:
        with faults_of(recipe, "training", "gradient_checkpointing"):
            recompute_blocks(backbone)
    with faults_of(recipe, "embedding_dim"):
        model = build_model(recipe, backbone=backbone)
    with faults_of(recipe, *(("transform", "size") if recipe.transform else ("backbone",))):
        blank = blank_input(recipe, train)  # a side too large needs more memory than there is
        try_model(model, blank)
    if sampler.batch_size == ranks:  # one image on each rank
        with faults_of(recipe, "sampler"):
            try_single_image(model, blank)
    with faults_of(recipe, "loss"):
        loss = recipe.loss.build(model.manifold, len(train.class_names))
    with faults_of(recipe, "regularizers"):
        regularizers = [regularizer.build(model.manifold) for regularizer in recipe.regularizers]
    objective = Objective(loss, regularizers, [regularizer.weight for regularizer in recipe.regularizers])
    if recipe.training.shard_proxies:
        with faults_of(recipe, "training", "shard_proxies"):
            objective.loss.keep_shard(rank, ranks)
    shared = {id(parameter) for parameter in model.parameters()}
    parameters = {
        **_backbone_parameters(recipe, model),
        "head": list(model.head.parameters()),
        # a learnable manifold belongs to the head, although the loss holds it too
        "loss": [parameter for parameter in objective.parameters() if id(parameter) not in shared],
    }
    with faults_of(recipe, "optimizer"):
        optimizer = recipe.optimizer.build(parameters, fused=recipe.training.precision != "fp16")
    average = WeightAverage(model, recipe.training.ema) if recipe.training.ema else None
    return Experiment(recipe, model, objective, optimizer, sampler, train, validation, average)


def _backbone_parameters(recipe: Recipe, model: EmbeddingModel) -> dict[str, list[nn.Parameter]]:
    if recipe.optimizer.layer_decay == 1:
        return {"backbone": model.backbone.tuned_parameters()}
    text = "nothing of the backbone trains; leave it out"
    try:
        blocks = model.backbone.tuned_blocks()
    except UserError:
        blocks, text = [], f"{recipe.backbone.name} has no blocks that can be told apart; leave it out"
    if not any(blocks):
        raise UserError(recipe.fault(("optimizer", "layer_decay"), text))
    return {f"backbone.{depth}": block for depth, block in enumerate(blocks, 1)}


@contextmanager
def faults_of(recipe: Recipe, *key: str) -> Generator[None]:
    """Tell what a member of a family objects to as one line, with the recipe's file, line and key.

    Raises:
        UserError: for every ValueError, RuntimeError and MemoryError.
    """
    try:
        yield
    except UserError as error:
        # a member that names its key itself, such as ``sampler.batch_size``, lacks only the place
        named, _, text = str(error).partition(": ")
        own = tuple(named.split("."))
        if own[0] != key[0] or "\n" in text:
            raise
        raise UserError(recipe.fault(own, text)) from error
    except (ValueError, RuntimeError, MemoryError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
            text = "needs more memory than there is here; make the model or the images smaller"
        raise UserError(recipe.fault(key, text)) from error


def refuse_zero_vectors(dataset: Dataset) -> None:
    """Make sure that vectors to be compared by their cosine have a direction, as evaluation does.

    Raises:
        UserError: one is zero.
    """
    zero = [index for index in range(len(dataset)) if not dataset.sample(index).any()]  # 0.5 s for 100 000 x 512
    if zero:
        raise UserError(
            f"dataset.embeddings: {len(zero)} of {len(dataset)} vectors are zero and have no direction for the cosine, "
            f"the first is {dataset.key(zero[0])}; leave them out, or compare by distance (manifold euclidean)"
        )


def blank_input(recipe: Recipe, dataset: Dataset) -> Tensor:
    """What the model takes of one black image (1, 3, S, S) uint8, or of one vector of zeros (1, F)."""
    if recipe.transform is None:
        return torch.zeros(1, dataset.num_features or 0)
    return torch.zeros(1, 3, recipe.transform.size, recipe.transform.size, dtype=torch.uint8)


@torch.no_grad()
def try_model(model: EmbeddingModel, blank: Tensor) -> None:
    """Show the model a black image of the recipe's size: what cannot take it says so before anything is written.

    Raises:
        ValueError: it cannot.
    """
    was_training = model.training
    try:
        model.eval()(blank)
    except AssertionError as error:  # so timm's networks put it
        raise ValueError(f"{list(blank.shape)}: {error}") from error
    model.train(was_training)


@torch.no_grad()
def try_single_image(model: EmbeddingModel, blank: Tensor) -> None:
    """Train a copy of the model on a batch of one image, for which batch norms of a map of 1 x 1 have no variance.

    Raises:
        ValueError: they have none.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            deepcopy(model).train()(blank)
        except ValueError as error:
            raise ValueError(
                f"batches of one image a rank are too small for batch norms; take at least 2: {error}"
            ) from error
