"""Estimate of how long a recipe trains on this machine, from a timed batch of its backbone."""

import shutil
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from time import perf_counter
from timeit import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.backbones.tuning import NoTuningConfig
from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset, evenly_spread
from dmlkit.distributed.device_name import count_cores
from dmlkit.distributed.launch import Ranks, resolve_device, start_ranks
from dmlkit.errors import UserError
from dmlkit.loading.batches import collate, default_workers
from dmlkit.loading.inputs import inputs_of
from dmlkit.model import EmbeddingModel, build_model
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.recipe.start import MOST_TUNING_EPOCHS, TUNINGS, Photos, least_epochs, plan_steps, starting_recipe
from dmlkit.vectors.features import MAPS, frozen_part, trained_part
from dmlkit.vectors.trained import without_pretrained_weights

TIMED = 16  # images: on one CPU core a batch of EfficientNet-Lite0 takes 0.6 s
# Memory of a training of EfficientNet-Lite0, batch 120, 160 pixels: 8.4 GB for all weights, whose forward pass keeps
# 41 MB per image for the backward pass, and 3.1 GB for the last 2 blocks, with 4.5 MB. Freed memory is kept.
OVERHEAD, MARGIN = 2e9, 1.35
SHARE = 0.6  # of the free memory that training may take
RECOMPUTED = 4 / 3  # time with a gradient cache: the forward pass, a third of a step, is computed twice
LEAST_CHUNK = 8
CONTAINER = Path("/sys/fs/cgroup")  # where Linux says the limit of a container
EPOCH = 0.1  # seconds of an epoch of a head on cached features: 540 photos, 200 epochs in 22 s on 2 CPU cores


class Estimate(NamedTuple):
    """Estimated time of a training."""

    seconds: float
    images_per_second: float  # through the backbone, backward too if it is trained
    kept: float = 0.0  # bytes per image that the forward pass keeps for the backward pass
    storing: float = 0.0  # of the seconds, those before the first step, in which features are computed and stored
    evaluating: float = 0.0  # of the seconds, those in which images of other splits are embedded
    disk: float = 0.0  # bytes that are stored during training

    def of_epochs(self, times: float) -> "Estimate":
        """Return the estimate of a training of so many times the epochs."""
        return self._replace(seconds=self.storing + times * (self.seconds - self.storing))

    def times_within(self, seconds: float) -> float:
        """Return how many times the epochs fit into some seconds."""
        return (seconds - self.storing) / (self.seconds - self.storing)


def estimate_training(recipe: Recipe, device: str, *, at_hand: bool = False) -> Estimate:
    """Estimate the time of ``dmlkit train`` for a recipe of images.

    What is stored of each image or view is computed once; all other layers run in each epoch. Nothing is downloaded:
    weights that are not ``at_hand`` are random here.
    """
    ranks = start_ranks(device, recipe.training.precision)
    train = recipe.dataset.build("train")
    held_out: list[Split] = [split for split in recipe.dataset.own_splits if split != "train"]
    sizes = {split: len(recipe.dataset.searched(split)) for split in held_out}
    with torch.random.fork_rng(devices=[]):
        model = build_model(recipe if at_hand else without_pretrained_weights(recipe)).to(ranks.device)
        pixels, reading = _read(train, recipe, training=True)
    transform, tuning, epochs = recipe.transform, recipe.backbone.tuning, recipe.training.trained_epochs
    larger = (transform.size / transform.training_side) ** 2 if transform else 1.0  # pixels of an image in evaluation
    workers = default_workers() if recipe.training.workers is None else max(1, recipe.training.workers)
    stored, part, inputs, storing, disk = tuning.stored(), model, pixels.to(ranks.device), 0.0, 0.0
    if stored is not None:
        frozen, part = frozen_part(recipe, model, ranks.device).model, trained_part(recipe, model).to(ranks.device)
        images = len(train) * max(1, stored.views) + larger * sum(sizes.values())
        storing = images * _per_image(_computing(frozen, inputs, ranks, backward=False), reading, workers, ranks)
        with torch.no_grad():
            inputs = frozen(inputs)
        disk = inputs[0].numel() * (MAPS.itemsize * stored.views * len(train) + 4 * larger * sum(sizes.values()))
        reading = 0.0  # of stored features
        if isinstance(tuning, NoTuningConfig):
            return Estimate(storing + epochs * EPOCH, images / storing, storing=storing)
    per_image = _per_image(_computing(part.eval(), inputs, ranks, backward=False), reading, workers, ranks)
    trained = _per_image(_computing(part.train(), inputs, ranks, backward=True), reading, workers, ranks)
    with ranks.autocast():
        kept = kept_bytes(part, inputs)
    # every split is embedded before the first step, validation after each epoch, and test after the last
    evaluated = (epochs + 1) * sizes.get("validation", 0) + 2 * sizes.get("test", 0)
    evaluating = evaluated * larger * per_image
    seconds = storing + epochs * len(train) * trained + evaluating
    return Estimate(seconds, 1 / trained, kept, storing, evaluating, disk)


def kept_bytes(model: EmbeddingModel, pixels: Tensor) -> float:
    """Return how many bytes per image the forward pass keeps for the backward pass, without the model's own tensors."""
    own_addresses = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> None:  # a graph that got its tensors back from here would never be freed
        kept[tensor.untyped_storage().data_ptr()] = tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda _: torch.empty(0)):
        model(pixels)
    size = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own_addresses)
    kept.clear()
    return size / len(pixels)


def free_memory(device: torch.device) -> float:
    """Return the free bytes of a device, or of a container with a limit; infinite where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = inf
    with suppress(OSError, ValueError):
        free = min(free, int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024)
    with suppress(OSError, ValueError):  # "max" without a limit
        limit, used = (int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
        kinds = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(kinds["inactive_file"]))  # files read before, which make room when needed
    return free


def time_model(model: EmbeddingModel, dataset: Dataset, recipe: Recipe, ranks: Ranks) -> float:
    """Return how many images per second are read and embedded here."""
    pixels, reading = _read(dataset, recipe, training=False)
    return 1 / _per_image(_computing(model, pixels, ranks, backward=False), reading, default_workers(), ranks)


class TrainingPlan(NamedTuple):
    """What `plan_training` chooses."""

    setting: Photos
    estimate: Estimate
    larger: tuple[str, float] | None  # the strongest tuning and its seconds, if they exceed the budget
    memory: float = 0.0  # bytes that a batch takes
    disk: float = 0.0  # bytes of the stored maps for which the disk has no room


def plan_training(setting: Photos, budget: float, device: str) -> TrainingPlan:
    """Choose how much of a backbone to train: the most that the budget allows, with as many epochs as pay.

    Each tuning that the backbone supports is timed by a batch; all weights come first and a head on frozen features
    last, which is chosen even where it exceeds the budget.
    """

    def trial(tuning: str) -> tuple[Photos, Estimate]:
        chosen = replace(setting, tuning=tuning, epochs=fewest_epochs)
        recipe = parse_recipe(starting_recipe(chosen), "recipe")
        return chosen, estimate_training(recipe, device, at_hand=setting.at_hand)

    larger, disk, fewest_epochs = None, 0.0, least_epochs(setting.images, setting.trained)
    free = SHARE * free_memory(torch.device(resolve_device(device)[0]))
    batch = plan_steps(setting.images, setting.trained)[0]
    first, *others, last = TUNINGS
    for tuning in (first, *others):
        try:
            chosen, estimate = trial(tuning)
        except UserError:
            if tuning == first:  # the photos cannot be read
                raise
            continue  # the network has no attention layers, or is not divided into blocks
        if estimate.disk > shutil.disk_usage(".").free:
            disk = estimate.disk
            continue
        memory = OVERHEAD + MARGIN * estimate.kept * batch
        if memory > free and batch > LEAST_CHUNK:
            chunk = max(LEAST_CHUNK, int((free - OVERHEAD) / (memory - OVERHEAD) * batch))
            chosen, estimate = replace(chosen, chunk=chunk), estimate.of_epochs(RECOMPUTED)
        if estimate.seconds <= budget:
            epochs = min(max(fewest_epochs, MOST_TUNING_EPOCHS), int(fewest_epochs * estimate.times_within(budget)))
            chosen = replace(chosen, epochs=epochs)
            return TrainingPlan(chosen, estimate.of_epochs(epochs / fewest_epochs), larger, memory, disk)
        larger = larger or (tuning, estimate.seconds)
    return TrainingPlan(*trial(last), larger, disk=disk)


def _read(dataset: Dataset, recipe: Recipe, *, training: bool) -> tuple[Tensor, float]:
    """Read evenly spaced images; return those that can be read, repeated to a batch, and the seconds per image."""
    inputs = inputs_of(dataset, recipe.transform, training=training)
    rows: list[int] = evenly_spread(torch.arange(len(dataset)), TIMED).tolist()
    inputs[rows[0], 0]  # what is imported and cached at the first image
    started = perf_counter()
    batch = collate([inputs[row, 0] for row in rows])
    seconds = (perf_counter() - started) / len(rows)
    if not len(batch.labels):
        raise UserError(batch.faults[0])
    return batch.inputs.repeat(ceil(TIMED / len(batch.inputs)), 1, 1, 1)[:TIMED], seconds


def _computing(model: EmbeddingModel, pixels: Tensor, ranks: Ranks, *, backward: bool) -> float:
    """Return the seconds per image of the model on the device."""
    pixels = pixels.to(ranks.device)

    def step() -> None:
        with ranks.autocast(), torch.set_grad_enabled(backward):
            loss = model(pixels).float().square().mean()
        if backward:
            loss.backward()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)

    return min(repeat(step, number=1, repeat=3)) / len(pixels)  # the first one is slower


def _per_image(computing: float, reading: float, workers: int, ranks: Ranks) -> float:
    """Return the seconds per image if ``workers`` processes read while the device computes, on shared processors."""
    if ranks.device.type != "cpu":
        return max(computing, reading / workers)
    cores = count_cores()
    busy = computing * min(torch.get_num_threads(), cores) + reading
    return max(computing, busy / cores, reading / workers)
