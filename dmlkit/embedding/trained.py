"""The model of a run, loaded for embedding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from dmlkit.backbones.tuning import FullTuningConfig
from dmlkit.errors import UserError
from dmlkit.model import EmbeddingModel, build_model, fingerprint
from dmlkit.recipe.file import dump_recipe, parse_recipe
from dmlkit.recipe.overrides import parse_override
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.checkpoint_file import load_weights
from dmlkit.run_folder.folder import CheckpointName, RunFolder

FROZEN = "frozen"
"""Key of a checkpoint without the pretrained weights that were not trained: the hash of these weights."""


@dataclass(frozen=True)
class TrainedModel:
    """Model of a run, ready to embed.

    Args:
        recipe: recipe of the run.
        model: model in evaluation mode, on the fabric's device.
        checkpoint: name of the checkpoint.
        epoch: number of finished epochs.
    """

    recipe: Recipe
    model: EmbeddingModel
    checkpoint: CheckpointName
    epoch: int


def load_model(
    run: RunFolder,
    fabric: Fabric,
    checkpoint: CheckpointName | None = None,
    *,
    overrides: Sequence[str] = (),
    merged: bool = True,
) -> TrainedModel:
    """Load the model of a run; by default its best checkpoint, or the last if there is no best.

    Args:
        run: folder of the run.
        fabric: device.
        checkpoint: name of the checkpoint.
        overrides: changes of the dataset, whose images may have moved, each ``key=value``.
        merged: add low-rank updates to the weights, see `Backbone.merge`.

    Raises:
        UserError: there is no run or no readable checkpoint, the pretrained weights that it needs are missing or have
            changed, or a key does not belong to the dataset.
    """
    recipe = recipe_of(run, overrides)
    if checkpoint is None:
        checkpoint = "best" if run.checkpoint_path("best").exists() else "last"
    state = run.load_checkpoint(checkpoint)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)  # as in training: what a file of weights may leave out is drawn again
        start = recipe if FROZEN in state else without_pretrained_weights(recipe)
        model = build_model(start, state.get("num_features"))
    take_weights(model, state, run.checkpoint_path(checkpoint))
    if merged:
        model.backbone.merge()
    return TrainedModel(recipe, model.to(fabric.device).eval(), checkpoint, state["epoch"])


def recipe_of(run: RunFolder, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a run, with changes of its dataset, whose images may have moved.

    Raises:
        UserError: there is no run, or a key does not belong to the dataset.
    """
    recipe = run.recipe()
    for override in overrides:
        if parse_override(override).key.partition(".")[0] != "dataset":
            raise UserError(
                f"--set {override}: expected a key of the dataset; other keys are fixed, because {run.path} is trained"
            )
    return parse_recipe(dump_recipe(recipe), str(run.recipe_path), overrides) if overrides else recipe


def without_pretrained_weights(recipe: Recipe) -> Recipe:
    """Return the recipe with a backbone without pretrained weights, since a file will bring all weights."""
    if not recipe.backbone.is_pretrained:
        return recipe
    return recipe.model_copy(update={"backbone": recipe.backbone.model_copy(update={"weights": None})})


def merged_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of the model after `Backbone.merge` has added low-rank updates to the weights."""
    return recipe.model_copy(update={"backbone": recipe.backbone.model_copy(update={"tuning": FullTuningConfig()})})


def take_weights(model: EmbeddingModel, state: Mapping[str, Any], path: Path) -> None:
    """Load a checkpoint into a model that already has the weights of which the checkpoint has only a hash.

    Raises:
        UserError: the model has other weights, or the checkpoint belongs to another recipe.
    """
    frozen = model.frozen_weights() if FROZEN in state else {}
    if frozen and fingerprint(frozen) != state[FROZEN]:
        raise UserError(
            f"{path}: backbone.weights names other weights than those that the run was trained on; they are not in the "
            "checkpoint; restore the original weights"
        )
    load_weights(model, {**frozen, **state["model"]}, path)
