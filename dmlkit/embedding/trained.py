"""The model of a run, what it can embed, and embeddings in memory. Into files: `dmlkit.embedding.run`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from dmlkit.backbones.tuning import FullTuningConfig
from dmlkit.errors import UserError
from dmlkit.model import EmbeddingModel, build_model, fingerprint
from dmlkit.recipe.file import dump_recipe, parse_override, parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.checkpoint_file import load_weights
from dmlkit.run_folder.folder import CheckpointName, RunFolder

FROZEN = "frozen"
"""Key of a checkpoint that lacks the pretrained weights that did not train: their hash."""


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run, ready to embed.

    Args:
        recipe: the run's.
        model: in evaluation mode, on the fabric's device.
        checkpoint: which of the run's checkpoints.
        epoch: finished epochs.
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
    """The model of a run; the best checkpoint where none is named, the last where none was chosen.

    Args:
        run: its folder.
        fabric: a device.
        checkpoint: which weights.
        overrides: ``key=value`` each, for the dataset alone: images may have moved, weights stay as they are.
        merged: updates of low rank are put into the weights, see `Backbone.merge`.

    Raises:
        UserError: there is no run, or no readable checkpoint of it, or the pretrained weights that it builds on are
            gone or others, or a key is not the dataset's.
    """
    recipe = run.recipe()
    for override in overrides:
        if parse_override(override).key.partition(".")[0] != "dataset":
            raise UserError(
                f"--set {override}: expected a key of the dataset; {run.path} is trained, with its own recipe"
            )
    if overrides:
        recipe = parse_recipe(dump_recipe(recipe), str(run.recipe_path), overrides)
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


def without_pretrained_weights(recipe: Recipe) -> Recipe:
    """The recipe with a fresh backbone: where a file brings all weights none need be fetched."""
    if not recipe.backbone.is_pretrained:
        return recipe
    return recipe.model_copy(update={"backbone": recipe.backbone.model_copy(update={"weights": None})})


def merged_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the model in which `Backbone.merge` has put updates of low rank into the weights."""
    return recipe.model_copy(update={"backbone": recipe.backbone.model_copy(update={"tuning": FullTuningConfig()})})


def take_weights(model: EmbeddingModel, state: Mapping[str, Any], path: Path) -> None:
    """Put a checkpoint into a model, which has the weights already that are only a hash in the checkpoint.

    Raises:
        UserError: the model has others, or the checkpoint is of another recipe.
    """
    frozen = model.frozen_weights() if FROZEN in state else {}
    if frozen and fingerprint(frozen) != state[FROZEN]:
        raise UserError(
            f"{path}: backbone.weights gives other weights than the run was trained on, and they are not in the "
            "checkpoint; bring those back"
        )
    load_weights(model, {**frozen, **state["model"]}, path)
