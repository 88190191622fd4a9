"""The model of a run, loaded for embedding."""

import hashlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from dmlkit.backbones.tuning import FullTuningConfig
from dmlkit.datasets.files.samples import samples_named
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import OptionError, UserError, warn
from dmlkit.manifolds.sphere import Sphere
from dmlkit.model import EmbeddingModel, FirstFeatures, backbone_alone, build_model, fingerprint
from dmlkit.recipe.overrides import parse_override
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.checkpoint_file import load_weights
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.vectors.computation import TrainedModel, accelerate, has_operators, kept_fingerprint, kept_operators
from dmlkit.vectors.manifest import Description, ModelSource, Preprocessing, StoredModel, VectorInput, index_of

MANIFOLD = "head.manifold."  # before the names of its learned options in a state dict
FROZEN = "frozen"
"""Key of a checkpoint without the pretrained weights that were not trained: the hash of these weights."""
MOVED_FILE = re.compile(r"if it has moved, use --set (?!dataset\.root=)[\w.]+=PATH")
"""Advice of a recipe on a missing file, except on the folder of its images."""
ALIGNED = "aligned_to"
"""Key of a checkpoint of a model in the space of an older one: the fingerprint of that one."""


def _once(make: Callable[[], EmbeddingModel]) -> Callable[[], EmbeddingModel]:
    """Return a function that makes a model when it is first called, and waits while another thread makes it."""
    lock, made = Lock(), cache(make)

    def get() -> EmbeddingModel:
        with lock:
            return made()

    return get


def load_model(
    run: RunFolder,
    ranks: Ranks,
    checkpoint: CheckpointName | None = None,
    *,
    overrides: Sequence[str] = (),
    merged: bool = True,
) -> TrainedModel:
    """Load the model of a run; by default its best checkpoint, or the last if there is no best.

    Args:
        checkpoint: name of the checkpoint; for ``pretrained`` see `pretrained_model`.
        merged: add low-rank updates to the weights, see `Backbone.merge`.
    """
    recipe = recipe_of(run, overrides)
    checkpoint = checkpoint or run.best_or_last()
    if checkpoint == "pretrained":
        has_pixels = samples_named(recipe.dataset.sample).has_pixels
        num_features = None if has_pixels else run.load_checkpoint(run.best_or_last())["num_features"]
        with files_of_run(run):
            trained = pretrained_model(recipe, num_features, ranks, merged=merged)
        return computed_by(replace(trained, run=run), ranks) if merged else trained
    state, path = run.load_checkpoint(checkpoint), run.checkpoint_path(checkpoint)
    device, weights, num_features = ranks.device, state["model"], state.get("num_features")

    @_once
    def build() -> EmbeddingModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)  # as in training: what a file of weights may leave out is drawn again
            with files_of_run(run):
                model = build_model(recipe if FROZEN in state else without_pretrained_weights(recipe), num_features)
        take_weights(model, state, path)
        state.clear()  # the model has them now
        if merged:
            model.backbone.merge()
        return model.to(device).eval()

    manifold = recipe.manifold.build(recipe.embedding_dim)
    learned = {name.removeprefix(MANIFOLD): weight for name, weight in weights.items() if name.startswith(MANIFOLD)}
    load_weights(manifold, learned, path)
    saved = ""
    if merged:
        network = recipe.model_dump_json(include={"backbone", "head", "manifold", "embedding_dim"})
        depends = f"{fingerprint(weights)} {state.get(FROZEN)} {network}"
        saved = hashlib.sha256(depends.encode()).hexdigest()
    trained = TrainedModel(
        recipe=recipe,
        samples=samples_named(recipe.dataset.sample).of(num_features),
        manifold=manifold.to(device),
        device=device,
        build=build,
        saved=saved,
        checkpoint=checkpoint,
        epoch=state["epoch"],
        recorded=_recorded(run, saved),
        run=run,
        aligned_to=state.get(ALIGNED),
    )
    if not merged:
        return trained
    if ranks.engine or not has_operators(trained):
        return computed_by(trained, ranks)

    @_once
    def few() -> EmbeddingModel:
        return kept_operators(trained) or build()

    return replace(trained, few=few, recorded=trained.recorded or kept_fingerprint(trained))


def pretrained_model(recipe: Recipe, num_features: int | None, ranks: Ranks, *, merged: bool = True) -> TrainedModel:
    """Return the checkpoint ``pretrained`` of a recipe: its backbone before the first step, without the head.

    Its points are the pooled features as unit vectors, compared by their cosine. Without pretrained weights the
    backbone is the random network from which training would start.

    Args:
        num_features: number of features of a vector; None for images.
        merged: add low-rank updates, which are zero, to the weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed)  # as in training; a GPU that trains keeps its state
        model = build_model(recipe, num_features)
    if merged:
        model.backbone.merge()
    return without_head(recipe, model.to(ranks.device))


def without_head(recipe: Recipe, model: EmbeddingModel) -> TrainedModel:
    """Return the checkpoint ``pretrained`` of a recipe, given a model with these weights, whose backbone is shared."""
    width = model.backbone.num_features
    recipe = recipe.model_copy(update={"manifold": Sphere.Config(), "embedding_dim": width})
    alone = backbone_alone(model, Sphere(width)).to(model.device).eval()
    return TrainedModel.of(recipe, alone, "pretrained")


def computed_by(trained: TrainedModel, ranks: Ranks) -> TrainedModel:
    """Return a model as the engine of a device computes it, see `accelerate`."""
    if not ranks.engine:
        return trained
    option = f"--device {trained.device.type}+{ranks.engine}"
    computed = accelerate(trained, ranks.engine, option)
    if computed.computation is not None and not computed.computation.agrees:
        warn(f"{option}: {computed.computation}; such embeddings are not compared with those of torch in float32")
    return computed


def _recorded(run: RunFolder, saved: str) -> str:
    """Return the fingerprint of a network that stored points of the run record; empty if none do."""
    for path in sorted(run.vectors.glob("*/model.json")) if saved else ():
        with suppress(UserError, OSError):
            stored = StoredModel.read(path)
            if stored.saved == saved:
                return stored.fingerprint
    return ""


def describe(trained: TrainedModel) -> Description:
    """Return the description of a model."""
    recipe, manifold, samples = trained.recipe, trained.manifold, trained.samples
    space = Sphere.Config() if trained.fusion else recipe.manifold
    return Description(
        dim=manifold.point_dim,
        features=manifold.dim,
        manifold=space.model_copy(update=manifold.learned_options()),
        similarity=manifold.similarity_name,
        index=index_of(manifold),
        model=ModelSource(
            fingerprint=trained.fingerprint,
            checkpoint=trained.checkpoint,
            epoch=trained.epoch,
            backbone=recipe.backbone.model_dump(mode="json"),
        ),
        preprocessing=Preprocessing(**recipe.transform.model_dump())
        if recipe.transform
        else VectorInput(input=f"{samples.name}s, as they are", num_features=samples.num_features),
        fusion=trained.fusion,
        computation=trained.computation,
        aligned_to=trained.aligned_to,
    )


def recipe_of(run: RunFolder, overrides: Sequence[str]) -> Recipe:
    """Return the recipe of a run, with changes of its dataset, whose images may have moved."""
    for override in overrides:
        if parse_override(override).key.partition(".")[0] != "dataset":
            raise UserError(
                f"--set {override}: expected a key of the dataset; other keys are fixed, because {run.path} is trained"
            )
    return run.recipe(overrides)


def shortened(trained: TrainedModel, dims: int) -> TrainedModel:
    """Return the model of the first features of the embeddings, which the loss ``matryoshka`` trains for this."""
    recipe, model = trained.recipe, trained.model
    if not 1 <= dims <= recipe.embedding_dim:
        raise UserError(f"--dims {dims}: expected 1 to {recipe.embedding_dim}, the width of the run's embeddings")
    if not recipe.manifold.has_prefixes:
        raise UserError(f"--dims {dims}: the first features of a {recipe.manifold.name} are those of one factor alone")
    head = FirstFeatures(model.head.num_features, model.manifold.with_dim(dims), model.head)
    short = EmbeddingModel(model.normalization, model.backbone, head, model.samples).to(trained.device).eval()
    shorter = recipe.model_copy(update={"embedding_dim": dims})
    return TrainedModel.of(shorter, short, trained.checkpoint, trained.epoch)


@contextmanager
def files_of_run(run: RunFolder) -> Generator[None]:
    """Say to restore a missing file of weights or data: unlike a recipe, a run takes another ``dataset.root`` alone."""

    def restore(text: str) -> str:
        return MOVED_FILE.sub(f"restore it, because {run.path} was trained on it", text)

    try:
        yield
    except OptionError as error:
        raise OptionError(error.key, restore(error.message)) from error
    except UserError as error:
        raise UserError(restore(str(error))) from error


def without_pretrained_weights(recipe: Recipe) -> Recipe:
    """Return the recipe with a backbone without pretrained weights, since a file will bring all weights."""
    if not recipe.backbone.is_pretrained:
        return recipe
    return recipe.model_copy(update={"backbone": recipe.backbone.model_copy(update={"weights": None})})


def merged_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the model after `Backbone.merge` has added low-rank updates to the weights."""
    return recipe.model_copy(update={"backbone": recipe.backbone.model_copy(update={"tuning": FullTuningConfig()})})


def take_weights(model: EmbeddingModel, state: Mapping[str, Any], path: Path) -> None:
    """Load a checkpoint into a model that already has the weights of which the checkpoint has only a hash."""
    frozen = model.frozen_weights() if FROZEN in state else {}
    if frozen and fingerprint(frozen) != state[FROZEN]:
        raise UserError(
            f"{path}: backbone.weights names other weights than those that the run was trained on; they are not in the "
            "checkpoint; restore the original weights"
        )
    load_weights(model, {**frozen, **state["model"]}, path)
