"""The recipe of a pretrained model: its pooled features, compared by their cosine, without training."""

import json
from collections.abc import Sequence
from typing import Any

from dmlkit.backbones.base import BackboneConfig
from dmlkit.backbones.timm_models import LITE0, LITES, is_at_hand
from dmlkit.errors import UserError
from dmlkit.files.source import NO_IMAGES
from dmlkit.recipe.faults import suggest
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.schema import Recipe


def pretrained_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a pretrained model, whose images are prepared as published with the weights.

    Args:
        name: name of a backbone in recipes, with the model of it after a colon, see `backbone_keys`.
        overrides: changes of the dataset, each ``key=value``: a pretrained model has no images of its own.
    """
    settings = {
        "dataset": {"name": "folder", "root": NO_IMAGES, "split": "all"},
        "transform": {"name": "pretrained"},
        "backbone": backbone_keys(name),
        "loss": {"name": "triplet"},  # a recipe has one; the model does not depend on it
        "metrics": ["recall@1", "map@r"],
    }
    try:
        return parse_recipe(json.dumps(settings), name, overrides).read_from({(): name})
    except UserError as error:
        raise UserError(str(error).replace(f"{name}:1: ", f"{name}: ")) from None  # nobody wrote a line of a file


def backbone_keys(name: str) -> dict[str, Any]:
    """Return the key ``backbone`` of a recipe for a name.

    After a colon comes the value of the option that names the model: ``model`` of timm, ``variant`` of vit, ``size`` of
    convnext. Weights are the pretrained ones of timm, and torchvision's best for ImageNet of the others.

    Example:
        >>> backbone_keys("timm:vit_small_patch14_dinov2")
        {'name': 'timm', 'weights': 'pretrained', 'model': 'vit_small_patch14_dinov2'}
        >>> backbone_keys("convnext:small")
        {'name': 'convnext', 'weights': 'imagenet', 'size': 'small'}
    """
    family, _, value = name.partition(":")
    members, unpublished = BackboneConfig.variants.items(), BackboneConfig.published_input
    known = [member for member, config in members if config.published_input is not unpublished]
    if family not in known:
        reason = "has no published weights" if family in BackboneConfig.variants else "no run and no backbone"
        raise UserError(f"{name}: {reason}; {suggest(family, known)}")
    fields = BackboneConfig.variants[family].model_fields
    shared = {*BackboneConfig.model_fields, "name", "weights", "pooling"}
    option = next((key for key in fields if key not in shared), None)
    if option is None and value:
        raise UserError(f"{name}: {family} has no variants; use {family}")
    if option is not None and fields[option].is_required() and not value:
        raise UserError(f"{name}: expected {family}:{option.upper()}, e.g. timm:{LITE0.model}")
    weights = "pretrained" if family == "timm" else "imagenet"
    if any(value.partition(".")[0] == lite.model and is_at_hand(lite) for lite in LITES):
        weights = "imagenet"  # in an installed package: no download
    return {"name": family, "weights": weights, **({option: value} if option and value else {})}
