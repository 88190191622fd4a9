"""Pretrained backbones by name, without a run: their features are the embeddings."""

import json
import re
from pathlib import Path
from typing import Any

import torch

from dmlkit.backbones.base import BackboneConfig
from dmlkit.backbones.pretrained import efficientnet_lite
from dmlkit.backbones.pretrained.timm_models import LITE0, is_at_hand
from dmlkit.distributed.launch import Ranks
from dmlkit.embedding.trained import TrainedModel, computed_by
from dmlkit.errors import UserError
from dmlkit.manifolds.sphere import Sphere
from dmlkit.model import backbone_alone, build_model
from dmlkit.recipe.faults import suggest
from dmlkit.recipe.file import parse_recipe

NAME = re.compile(r"(\w{2,})(?::(.+))?")  # of two letters or more: C: is a drive


def is_backbone_name(text: str) -> bool:
    """Return whether a text names a backbone, e.g. ``resnet50`` or ``timm:MODEL``, and no existing file or folder."""
    found = NAME.fullmatch(text)
    is_name = found is not None and (found[2] is not None or found[1] in BackboneConfig.variants)
    return is_name and not Path(text).exists()


def load_pretrained(name: str, fabric: Ranks) -> TrainedModel:
    """Return an untrained model: the features of a pretrained backbone, compared by cosine similarity.

    Images are prepared as published with the weights.

    Args:
        name: name of a backbone in recipes, with the model of it after a colon, see `backbone_keys`.
        fabric: device.

    Raises:
        UserError: there is no such backbone or model, or its weights cannot be downloaded or read.
    """
    settings = {
        "dataset": {"name": "glyphs"},  # a recipe has a dataset and a loss; the model does not depend on them
        "transform": {"name": "pretrained"},
        "backbone": backbone_keys(name),
        "loss": {"name": "triplet"},
    }
    try:
        recipe = parse_recipe(json.dumps(settings), name)
    except UserError as error:
        raise UserError(str(error).replace(f"{name}:1: ", f"{name}: ")) from None  # nobody wrote a line of a file
    with torch.random.fork_rng(devices=[]):  # the head that is left out is drawn at random
        model = build_model(recipe)
    width = model.backbone.num_features
    alone = backbone_alone(model, Sphere(width)).to(fabric.device).eval()
    recipe = recipe.model_copy(update={"manifold": Sphere.Config(), "embedding_dim": width})
    return computed_by(TrainedModel.of(recipe, alone), fabric)


def backbone_keys(name: str) -> dict[str, Any]:
    """Return the key ``backbone`` of a recipe for a name.

    After a colon comes the value of the option that names the model: ``model`` of timm, ``variant`` of vit, ``size`` of
    convnext. Weights are the pretrained ones of timm, and torchvision's best for ImageNet of the others.

    Raises:
        UserError: there is no such backbone, or it has no published weights.

    Example:
        >>> backbone_keys("timm:vit_small_patch14_dinov2")
        {'name': 'timm', 'weights': 'pretrained', 'model': 'vit_small_patch14_dinov2'}
        >>> backbone_keys("convnext:small")
        {'name': 'convnext', 'weights': 'imagenet', 'size': 'small'}
    """
    family, _, value = name.partition(":")
    known = [one for one, config in sorted(BackboneConfig.variants.items()) if _is_published(config)]
    if family not in known:
        what = "has no published weights" if family in BackboneConfig.variants else "no run and no backbone"
        raise UserError(f"{name}: {what}; {suggest(family, known)}")
    fields = BackboneConfig.variants[family].model_fields
    shared = {*BackboneConfig.model_fields, "name", "weights", "pooling"}
    option = next((key for key in fields if key not in shared), None)
    if option is None and value:
        raise UserError(f"{name}: {family} has no variants; use {family}")
    if option is not None and fields[option].is_required() and not value:
        raise UserError(f"{name}: expected {family}:{option.upper()}, e.g. timm:{LITE0.model}")
    weights = "pretrained" if family == "timm" else "imagenet"
    if family == "timm" and value.partition(".")[0] == efficientnet_lite.MODEL and is_at_hand(LITE0):
        weights = LITE0.weights  # in an installed package: no download
    return {"name": family, "weights": weights, **({option: value} if option and value else {})}


def _is_published(config: type[BackboneConfig]) -> bool:
    return config.published_input is not BackboneConfig.published_input
