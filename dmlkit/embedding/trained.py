"""The model of a run, what it can embed, and embeddings in memory. Into files: `dmlkit.embedding.run`."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fabric import Fabric

from dmlkit.errors import UserError
from dmlkit.model import EmbeddingModel, build_model
from dmlkit.recipe.file import dump_recipe, parse_override, parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.checkpoint_file import load_weights
from dmlkit.run_folder.folder import CheckpointName, RunFolder


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
    run: RunFolder, fabric: Fabric, checkpoint: CheckpointName | None = None, *, overrides: Sequence[str] = ()
) -> TrainedModel:
    """The model of a run; the best checkpoint where none is named, the last where none was chosen.

    Args:
        run: its folder.
        fabric: a device.
        checkpoint: which weights.
        overrides: ``key=value`` each, for the dataset alone: images may have moved, weights stay as they are.

    Raises:
        UserError: there is no run, or no readable checkpoint of it, or a key that is not the dataset's.
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
    model = build_model(without_pretrained_weights(recipe))
    load_weights(model, state["model"], run.checkpoint_path(checkpoint))
    return TrainedModel(recipe, model.to(fabric.device).eval(), checkpoint, state["epoch"])


def without_pretrained_weights(recipe: Recipe) -> Recipe:
    """The recipe with a fresh backbone: a checkpoint brings the weights, so none need be fetched."""
    if getattr(recipe.backbone, "weights", None) is None:
        return recipe
    return recipe.model_copy(update={"backbone": recipe.backbone.model_copy(update={"weights": None})})
