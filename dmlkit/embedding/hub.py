"""A folder in the form of a model of the Hugging Face Hub, as ``dmlkit export --format hub`` writes it: loaded here."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dmlkit.distributed.launch import Ranks
from dmlkit.embedding.manifest import Description, VectorInput
from dmlkit.embedding.trained import TrainedModel, computed_by, without_pretrained_weights
from dmlkit.errors import UserError
from dmlkit.files.regular import require_regular_file
from dmlkit.model import build_model
from dmlkit.recipe.file import read_recipe
from dmlkit.run_folder.checkpoint_file import load_weights
from dmlkit.run_folder.threshold import Threshold

CONFIG, WEIGHTS, RECIPE, CARD = "config.json", "model.safetensors", "recipe.yaml", "README.md"
FILES = (CONFIG, WEIGHTS, RECIPE, CARD)


class HubConfig(Description, frozen=True, strict=True):
    """``config.json`` of a folder for the Hub: preprocessing, geometry and fingerprint of its model."""

    kind: ClassVar[str] = "config of a model for the Hub"

    threshold: Threshold | None = None
    """Similarity from which two embeddings are of one class, if ``dmlkit calibrate`` was run before."""


def is_hub_folder(path: Path) -> bool:
    """Return whether a folder has the files of a model for the Hub, of any version."""
    return all((path / name).is_file() for name in (CONFIG, WEIGHTS, RECIPE))


def load_hub(folder: Path, fabric: Ranks) -> TrainedModel:
    """Load the model of a folder for the Hub, see `is_hub_folder`.

    Args:
        folder: the folder.
        fabric: device.

    Raises:
        UserError: a file is damaged, of another version, or does not belong to the others.
    """
    config = HubConfig.read(folder / CONFIG)
    recipe = read_recipe(folder / RECIPE, is_trained=True)
    width = config.preprocessing.num_features if isinstance(config.preprocessing, VectorInput) else None
    with torch.random.fork_rng(devices=[]):
        model = build_model(without_pretrained_weights(recipe), width)
    path = folder / WEIGHTS
    require_regular_file(path)
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: cannot read these weights: {error}; copy the file again") from error
    load_weights(model, weights, path)
    model = model.to(fabric.device).eval()
    found = model.fingerprint()
    if found != config.model.fingerprint:
        raise UserError(
            f"{path}: has weights with the fingerprint {found[:12]}, but {folder / CONFIG} names "
            f"{config.model.fingerprint[:12]}; all files must be of one export: copy the folder again"
        )
    trained = TrainedModel.of(recipe, model, config.model.checkpoint, config.model.epoch)
    return computed_by(replace(trained, aligned_to=config.aligned_to), fabric)
