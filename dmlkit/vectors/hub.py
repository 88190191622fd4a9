"""A folder in the form of a model of the Hugging Face Hub, as ``dmlkit export --format hub`` writes it: loaded here.

The folder is on this machine, or at an address ``hf://OWNER/NAME`` from which it is downloaded.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from dmlkit.backbones.timm_models import SOURCES, calling_hub
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, first_line
from dmlkit.files.escape import excerpt
from dmlkit.files.regular import require_regular_file
from dmlkit.files.yaml_tree import read_yaml
from dmlkit.model import build_model
from dmlkit.recipe.file import KEYS, read_recipe
from dmlkit.recipe.overrides import EXTENDS
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.checkpoint_file import load_weights
from dmlkit.run_folder.threshold import Threshold
from dmlkit.vectors.manifest import Description, VectorInput
from dmlkit.vectors.trained import TrainedModel, computed_by, without_pretrained_weights

CONFIG, WEIGHTS, RECIPE, CARD = "config.json", "model.safetensors", "recipe.yaml", "README.md"
FILES = (CONFIG, WEIGHTS, RECIPE, CARD)
SCHEME = "hf://"
PART = "[A-Za-z0-9_][A-Za-z0-9_.-]*"  # of an address: no part is .. or empty
ADDRESS = re.compile(rf"{SCHEME}(?P<repository>{PART}/{PART})(@(?P<revision>{PART}(/{PART})*))?")


class HubConfig(Description, frozen=True, strict=True):
    """``config.json`` of a folder for the Hub: preprocessing, geometry and fingerprint of its model."""

    kind: ClassVar[str] = "config of a model for the Hub"

    threshold: Threshold | None = None
    """Similarity from which two embeddings are of one class, if ``dmlkit calibrate`` was run before."""


def is_hub_folder(path: Path) -> bool:
    """Return whether a folder has the files of a model for the Hub, of any version."""
    return all((path / name).is_file() for name in (CONFIG, WEIGHTS, RECIPE))


def download(address: str) -> Path:
    """Return the folder of a model of the Hub: three files, which huggingface_hub downloads once and keeps.

    Example:
        >>> download("hf://birds")
        Traceback (most recent call last):
        ...
        dmlkit.errors.UserError: hf://birds: expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION
    """
    parts = ADDRESS.fullmatch(address)
    if parts is None:
        raise UserError(f"{excerpt(address)}: expected {SCHEME}OWNER/NAME or {SCHEME}OWNER/NAME@REVISION")
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise UserError(
            f"{address}: huggingface_hub is not installed; install it with: pip install 'dmlkit[timm]'"
        ) from None
    repository, revision = parts["repository"], parts["revision"]
    terms, login = f"accept its terms on https://huggingface.co/{repository}", "log in with hf auth login"
    known: dict[Any, str] = {
        errors.GatedRepoError: f"access is restricted; {terms}, and {login}",
        errors.RepositoryNotFoundError: f"no such repository, or it is private; check the name, or {login}",
        errors.RevisionNotFoundError: f"the repository has no branch, tag or commit {revision or 'main'}",
        Exception: f"download {CONFIG}, {WEIGHTS} and {RECIPE} on a machine with network access, and load their folder",
    }
    try:
        with calling_hub():
            folder = snapshot_download(repository, revision=revision, allow_patterns=[CONFIG, WEIGHTS, RECIPE])
    except Exception as error:  # many kinds: no network, offline mode, a full disk
        kind = next(kind for kind in known if isinstance(error, kind))
        reason = f"cannot download it ({first_line(error)}); " if kind is Exception else ""
        raise UserError(f"{address}: {reason}{known[kind]}") from error
    if missing := [name for name in (CONFIG, WEIGHTS, RECIPE) if not Path(folder, name).is_file()]:
        raise UserError(
            f"{address}: has no {' and no '.join(missing)}; expected a model that dmlkit export --format hub wrote "
            f"(models of timm are timm:hf-hub:{repository})"
        )
    return Path(folder)


def load_hub(folder: Path, ranks: Ranks) -> TrainedModel:
    """Load the model of a folder for the Hub, see `is_hub_folder`."""
    config = HubConfig.read(folder / CONFIG)
    recipe = _complete_recipe(folder / RECIPE)
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
    model = model.to(ranks.device).eval()
    fingerprint = model.fingerprint()
    if fingerprint != config.model.fingerprint:
        raise UserError(
            f"{path}: has weights with the fingerprint {fingerprint[:12]}, but {folder / CONFIG} names "
            f"{config.model.fingerprint[:12]}; all files must be of one export: copy the folder again"
        )
    trained = TrainedModel.of(recipe, model, config.model.checkpoint, config.model.epoch)
    return computed_by(replace(trained, aligned_to=config.aligned_to), ranks)


def _complete_recipe(path: Path) -> Recipe:
    """Read a recipe that names no other file or repository to read: the folder may come from anybody."""
    data: Any = read_yaml(path, "recipe", f"{path}: missing; expected the recipe of the model").data
    data = data if isinstance(data, dict) else {}
    backbone, transform = (part if isinstance(part := data.get(key), dict) else {} for key in ("backbone", "transform"))
    is_elsewhere = str(backbone.get("model", "")).startswith(SOURCES)
    faults = {
        f"{EXTENDS} is not allowed": EXTENDS in data,
        "regularizers are not allowed": bool(data.get("regularizers")),  # they may name runs
        "backbone.architecture is missing": is_elsewhere and backbone.get("architecture") is None,
        "transform has not all keys": transform.get("name") == "pretrained" and not transform.keys() >= KEYS,
    }
    for fault, is_found in faults.items():
        if is_found:
            raise UserError(f"{path}: {fault} in the recipe of an exported model; export the model again")
    return read_recipe(path, is_trained=True)
