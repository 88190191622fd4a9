"""Estimate of how long a recipe trains on this machine, from a timed batch of its backbone."""

from dataclasses import replace
from math import ceil
from time import perf_counter
from timeit import repeat
from typing import NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor

from dmlkit.backbones.tuning import NoTuningConfig
from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.device_name import count_cores
from dmlkit.distributed.launch import start_fabric
from dmlkit.errors import UserError
from dmlkit.loading.batches import collate, default_workers
from dmlkit.loading.inputs import inputs_of
from dmlkit.model import EmbeddingModel, build_model
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.recipe.start import MOST_TUNING_EPOCHS, TUNINGS, Photos, least_epochs, starting_recipe
from dmlkit.vectors.trained import without_pretrained_weights

TIMED = 16  # images: on one CPU core a batch of EfficientNet-Lite0 takes 0.6 s
EPOCH = 0.1  # seconds of an epoch of a head on cached features: 540 photos, 200 epochs in 22 s on 2 CPU cores


class Estimate(NamedTuple):
    """Estimated time of a training."""

    seconds: float
    images_per_second: float  # through the backbone, backward too if it is trained


def estimate_training(recipe: Recipe, device: str = "auto", *, at_hand: bool = False) -> Estimate:
    """Estimate the time of ``dmlkit train`` for a recipe of images.

    A frozen backbone computes the features of each image once, or once per view; otherwise it is trained in each epoch.
    Nothing is downloaded.

    Args:
        at_hand: whether the pretrained weights are on this machine; if not, the weights are random here.
    """
    fabric = start_fabric(device, recipe.training.precision)
    train = recipe.dataset.build("train")
    held_out: list[Split] = [split for split in recipe.dataset.own_splits if split != "train"]
    sizes = {split: len(recipe.dataset.build(split)) for split in held_out}
    with torch.random.fork_rng(devices=[]):
        model = build_model(recipe if at_hand else without_pretrained_weights(recipe)).to(fabric.device)
        pixels, reading = _read(train, recipe)
    tuning, epochs = recipe.backbone.tuning, recipe.training.trained_epochs
    workers = default_workers() if recipe.training.workers is None else max(1, recipe.training.workers)
    is_frozen = isinstance(tuning, NoTuningConfig)
    computing = _computing(model.eval(), pixels, fabric, backward=False)
    per_image = _per_image(computing, reading, workers, fabric)
    if isinstance(tuning, NoTuningConfig) and tuning.features == "cached":
        views = len(train) * max(1, tuning.feature_views)
        return Estimate((views + sum(sizes.values())) * per_image + epochs * EPOCH, 1 / per_image)
    trained = _per_image(_computing(model.train(), pixels, fabric, backward=not is_frozen), reading, workers, fabric)
    # every split is embedded before the first step, validation after each epoch, and test after the last
    evaluated = (epochs + 1) * sizes.get("validation", 0) + 2 * sizes.get("test", 0)
    return Estimate(epochs * len(train) * trained + evaluated * per_image, 1 / trained)


class TrainingPlan(NamedTuple):
    """What `plan_training` chooses."""

    setting: Photos
    estimate: Estimate
    larger: tuple[str, float] | None  # the strongest tuning and its seconds, if they exceed the budget


def plan_training(setting: Photos, budget: float, device: str = "auto") -> TrainingPlan:
    """Choose how much of a backbone to train: the most that the budget allows, with as many epochs as pay.

    Each tuning is timed by a batch; all weights come first and a head on frozen features last, which is chosen even
    where it exceeds the budget.
    """

    def trial(tuning: str, epochs: int) -> tuple[Photos, Estimate]:
        chosen = replace(setting, tuning=tuning, epochs=epochs)
        recipe = parse_recipe(starting_recipe(chosen), "recipe")
        return chosen, estimate_training(recipe, device, at_hand=setting.at_hand)

    larger, least = None, least_epochs(setting.images, setting.trained)
    *stronger, last = TUNINGS
    for tuning in stronger:
        chosen, estimate = trial(tuning, least)
        if estimate.seconds <= budget:
            epochs = min(max(least, MOST_TUNING_EPOCHS), int(least * budget / estimate.seconds))
            seconds = estimate.seconds * epochs / least
            return TrainingPlan(replace(chosen, epochs=epochs), estimate._replace(seconds=seconds), larger)
        larger = larger or (tuning, estimate.seconds)
    return TrainingPlan(*trial(last, least), larger)


def _read(dataset: Dataset, recipe: Recipe) -> tuple[Tensor, float]:
    """Read evenly spaced images; return those that can be read, repeated to a batch, and the seconds per image."""
    inputs = inputs_of(dataset, recipe.transform, training=True)
    rows = sorted({int(row) for row in torch.linspace(0, len(dataset) - 1, TIMED).round()})
    inputs[rows[0], 0]  # what is imported and cached at the first image
    started = perf_counter()
    batch = collate([inputs[row, 0] for row in rows])
    seconds = (perf_counter() - started) / len(rows)
    if not len(batch.labels):
        raise UserError(batch.faults[0])
    return batch.inputs.repeat(ceil(TIMED / len(batch.inputs)), 1, 1, 1)[:TIMED], seconds


def _computing(model: EmbeddingModel, pixels: Tensor, fabric: Fabric, *, backward: bool) -> float:
    """Return the seconds per image of the model on the device."""
    pixels = pixels.to(fabric.device)

    def step() -> None:
        with fabric.autocast(), torch.set_grad_enabled(backward):
            loss = model(pixels).float().square().mean()
        if backward:
            loss.backward()
        if fabric.device.type == "cuda":
            torch.cuda.synchronize(fabric.device)

    return min(repeat(step, number=1, repeat=3)) / len(pixels)  # the first one is slower


def _per_image(computing: float, reading: float, workers: int, fabric: Fabric) -> float:
    """Return the seconds per image if ``workers`` processes read while the device computes, on shared processors."""
    if fabric.device.type != "cpu":
        return max(computing, reading / workers)
    cores = count_cores()
    busy = computing * min(torch.get_num_threads(), cores) + reading
    return max(computing, busy / cores, reading / workers)
