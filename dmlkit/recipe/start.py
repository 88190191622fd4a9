"""The first recipe for someone's photos: plain choices, each with its reason in a comment."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from dmlkit.backbones.pretrained.at_hand import Pretrained
from dmlkit.datasets.base import DatasetConfig
from dmlkit.errors import UserError

LEAST_VALIDATION = 10  # classes: fewer choose a checkpoint by chance
MOST_VALIDATION = 0.3  # of the training classes
MARK = "by dmlkit start"
STAMP = re.compile(r" \(sha256 ([0-9a-f]{16})\)$")
"""What ends the first line: a checksum of the text without it, by which a recipe that was edited is known."""
EPOCHS = 20  # where photos of 40 products stopped gaining with a head on frozen features


@dataclass(frozen=True)
class Photos:
    """What a first recipe depends on.

    Args:
        dataset: the photos.
        images: of the training split.
        classes: of the training split.
        names_validation: the dataset says itself which classes validate.
        backbone: to start from.
        at_hand: its weights lie on this machine.
        gpu: there is one.
    """

    dataset: DatasetConfig
    images: int
    classes: int
    names_validation: bool
    backbone: Pretrained
    at_hand: bool
    gpu: bool


def starting_recipe(setting: Photos) -> str:
    """Return the text of a recipe: YAML with comments, and with its own checksum in the first line."""
    text = "\n".join(
        [
            f"# A first recipe for {setting.images:,} training photos of {setting.classes:,} classes, {MARK}",
            *_dataset(setting),
            *_backbone(setting),
            "embedding_dim: 512",
            "loss: {name: proxy_anchor}   # needs little tuning, for few classes and for many",
            *_training(setting),
            "",
        ]
    )
    return text.replace("\n", f" (sha256 {_checksum(text)})\n", 1)


def is_starting_recipe(path: Path) -> bool:
    """Return whether a file is as `starting_recipe` wrote it, so that nothing of the user's is lost with it.

    Raises:
        UserError: `starting_recipe` wrote it, and it has been edited since.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    head, newline, body = text.partition("\n")
    stamp = STAMP.search(head)
    if stamp and stamp[1] == _checksum(STAMP.sub("", head) + newline + body):
        return True
    if MARK in head:
        raise UserError(
            f"--output {path}: has been edited since dmlkit start wrote it; choose another --output, or remove the file"
        )
    return False


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def validation_fraction(classes: int) -> float:
    """Return the share of training classes to validate on.

    Example:
        >>> validation_fraction(40), validation_fraction(1000), validation_fraction(6)
        (0.25, 0.1, 0.3)
    """
    return round(min(MOST_VALIDATION, max(0.1, LEAST_VALIDATION / classes)), 3)


def _dataset(setting: Photos) -> list[str]:
    dataset = setting.dataset
    place = {key: getattr(dataset, key) for key in ("root", "file") if getattr(dataset, key, None) is not None}
    lines = ["dataset:", f"  name: {dataset.name}"]
    lines += [f"  {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in place.items()]
    if not setting.names_validation:
        fraction = validation_fraction(setting.classes)
        held_out = max(2, -(-setting.classes * fraction // 1))
        lines.append(
            f"  validation_fraction: {fraction}   # {held_out:.0f} training classes choose the best checkpoint; "
            "test classes choose nothing"
        )
    return lines


def _backbone(setting: Photos) -> list[str]:
    choice = setting.backbone
    where = "its weights are on this machine" if setting.at_hand else f"downloads {choice.megabytes} MB at first"
    lines = [
        "backbone:",
        "  name: timm",
        f"  model: {choice.model}   # {choice.title}; {where}",
        f"  weights: {choice.weights}",
    ]
    if choice.image_size is not None:
        lines.append(f"  image_size: {choice.image_size}   # pixels; its positions are interpolated")
    if choice.pooling is not None:
        lines.append(f"  pooling: {{name: {choice.pooling}}}   # as its authors do")
    if setting.gpu:
        lines.append(
            "  tuning: {name: full}   # all weights are trained; {name: none} takes minutes, {name: lora} less memory"
        )
    else:
        lines.append(
            "  tuning: {name: none, feature_views: 4}   # no GPU here: features are computed once, a head is trained "
            "on them"
        )
    return [
        *lines,
        "transform: {name: pretrained}   # the size, colours and cropping that these weights were trained with",
    ]


def _training(setting: Photos) -> list[str]:
    rate, why = ("1e-4", "small, for all weights") if setting.gpu else ("1e-3", "larger, for the head alone")
    batch = min(120, max(8, setting.images // 4))
    return [
        f"sampler: {{name: random, batch_size: {batch}}}",
        "optimizer:",
        "  name: adamw",
        f"  lr: {rate}   # {why}",
        "  lr_multipliers: {loss: 10}   # proxies see few gradients; they need a larger step",
        "schedule: {name: cosine, warmup_epochs: 1.0}",
        f"training: {{epochs: {EPOCHS}}}",
        "metrics: [recall@1, map@r]",
    ]
