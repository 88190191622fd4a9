"""A first recipe for the user's photos, with the reason for each choice in a comment."""

import json
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dmlkit.backbones.timm_models import Pretrained
    from dmlkit.datasets.base import DatasetConfig

LEAST_VALIDATION = 10  # classes; with fewer the choice of a checkpoint is mostly chance
LEAST_TRAINING = 4  # training classes of which some are held out: with 3, one would be left to train on
MOST_VALIDATION = 0.3  # of the training classes
# Steps of a training. 720 photos of 40 groceries, mean of 3 seeds: MAP@R on the 41 test classes is 0.034 above that of
# the pretrained backbone after 800 steps (200 epochs), 0.022 after 80.
STEPS = 800
FEWEST_EPOCHS, MOST_EPOCHS = 20, 200


@dataclass(frozen=True)
class Photos:
    """The facts that determine a first recipe."""

    dataset: "DatasetConfig"
    images: int  # in the training split
    classes: int  # in the training split
    trained: int  # images without those of classes held out for validation
    names_validation: bool  # whether the dataset has its own validation classes
    backbone: "Pretrained"
    at_hand: bool  # whether its weights are on this machine
    gpu: bool


def starting_recipe(setting: Photos) -> str:
    """Return the text of a recipe: YAML with comments."""
    photos = f"{setting.trained:,} photos of {trained_classes(setting):,} classes"
    return "\n".join(
        [
            f"# A first recipe that trains on {photos}, by dmlkit start",
            *_dataset(setting),
            *_backbone(setting),
            "embedding_dim: 512",
            "loss: {name: proxy_anchor}   # needs little tuning, with few or many classes",
            *_training(setting),
            "",
        ]
    )


def validation_fraction(classes: int) -> float:
    """Return the share of training classes to validate on; 0 if there are too few."""
    if classes < LEAST_TRAINING:
        return 0.0
    return round(min(MOST_VALIDATION, max(0.1, LEAST_VALIDATION / classes)), 3)


def plan_steps(images: int, trained: int) -> tuple[int, int, int]:
    """Return the size of a batch, the number of steps per epoch, and the number of epochs."""
    batch = min(120, trained, max(8, images // 4))
    steps = trained // batch  # images that do not fill the last batch are dropped for an epoch
    return batch, steps, min(MOST_EPOCHS, max(FEWEST_EPOCHS, -(-STEPS // steps)))


def held_out_classes(setting: Photos) -> int:
    """Return the number of training classes that are held out for validation."""
    fraction = 0.0 if setting.names_validation else validation_fraction(setting.classes)
    return max(2, ceil(setting.classes * fraction)) if fraction else 0


def trained_classes(setting: Photos) -> int:
    """Return the number of classes that are trained on."""
    return setting.classes - held_out_classes(setting)


def _dataset(setting: Photos) -> list[str]:
    dataset = setting.dataset
    place = {key: getattr(dataset, key) for key in ("root", "file") if getattr(dataset, key, None) is not None}
    lines = ["dataset:", f"  name: {dataset.name}"]
    lines += [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in place.items()]
    if dataset.split != "official":
        lines.append(f"  split: {dataset.split}   # of the classes: known individuals are no test of unseen ones")
    fraction = validation_fraction(setting.classes)
    if not setting.names_validation and not fraction:
        lines.append(
            f"  validation_fraction: 0.0   # {setting.classes} training classes are too few to hold out some; the last "
            "checkpoint is used"
        )
    elif not setting.names_validation:
        lines.append(
            f"  validation_fraction: {fraction}   # {held_out_classes(setting)} training classes choose the best "
            "checkpoint; test classes are never used to choose anything"
        )
    return lines


def _backbone(setting: Photos) -> list[str]:
    choice = setting.backbone
    where = "its weights are on this machine" if setting.at_hand else f"downloads {choice.megabytes} MB once"
    lines = [
        "backbone:",
        "  name: timm",
        f"  model: {choice.model}   # {choice.title}; {where}",
        f"  weights: {choice.weights}",
    ]
    if choice.image_size is not None:
        lines.append(f"  image_size: {choice.image_size}   # pixels; position embeddings are interpolated")
    if choice.pooling is not None:
        lines.append(f"  pooling: {{name: {choice.pooling}}}   # as in the original model")
    if setting.gpu:
        lines.append(
            "  tuning: {name: full}   # trains all weights; {name: none} takes minutes, {name: lora} needs less memory"
        )
    else:
        lines.append("  tuning:   # without a GPU: features are computed once, and a head is trained on them")
        lines += ["    name: none", "    feature_views: 4   # augmented images of each photo"]
    return [
        *lines,
        "transform: {name: pretrained}   # image size, normalization and cropping of the pretrained weights",
    ]


def _training(setting: Photos) -> list[str]:
    rate, why = (
        ("1e-4", "small, because all weights are trained") if setting.gpu else ("1e-3", "larger, for a head only")
    )
    batch, steps, epochs = plan_steps(setting.images, setting.trained)
    return [
        f"sampler: {{name: random, batch_size: {batch}}}",
        "optimizer:",
        "  name: adamw",
        f"  lr: {rate}   # {why}",
        "  lr_multipliers: {loss: 10}   # each proxy gets few gradients and needs a larger step",
        "schedule: {name: cosine, warmup_epochs: 1.0}",
        f"training: {{epochs: {epochs}}}   # {epochs * steps:,} steps; more photos need fewer epochs",
        "metrics: [recall@1, map@r]",
    ]
