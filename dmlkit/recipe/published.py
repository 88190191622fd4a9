"""Keys that a backbone's weights determine, added to a recipe, so that a run is read without network and timm."""

import json
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from dmlkit.backbones.base import BackboneConfig
from dmlkit.component import from_weights, one_of
from dmlkit.errors import UserError
from dmlkit.recipe.schema import Recipe
from dmlkit.recipe.yaml_tree import Tree
from dmlkit.transforms.presets import PretrainedConfig

BACKBONE: TypeAdapter[BackboneConfig] = TypeAdapter(Annotated[BackboneConfig, one_of])
KEYS = {key for key, info in PretrainedConfig.model_fields.items() if from_weights in info.metadata}


def write_out(tree: Tree) -> None:
    """Add the keys that a backbone's weights determine and the tree does not have.

    Raises:
        UserError: the values cannot be determined; the message has file and line.
    """
    data: Any = tree.data
    if not isinstance(data, dict):
        return
    try:
        named = "backbone" in data
        backbone = BACKBONE.validate_json(json.dumps(data["backbone"])) if named else _default_backbone()
    except ValidationError:  # validation of the recipe will report it
        return
    try:
        if named:
            data["backbone"] |= backbone.resolved_keys()
        transform = data.get("transform")
        if isinstance(transform, dict) and transform.get("name") == "pretrained" and not transform.keys() >= KEYS:
            size = transform.get("size")
            keys = backbone.published_input().keys(size if isinstance(size, int) else None)
            data["transform"] = keys | transform
    except UserError as error:
        key = str(error).partition(": ")[0]
        raise UserError(f"{tree.origin(tuple(key.split('.')))}: {error}") from error


def _default_backbone() -> BackboneConfig:
    return Recipe.model_fields["backbone"].default
