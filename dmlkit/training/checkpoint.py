"""Checkpoints: writing and restoring everything that the rest of a run depends on."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from dmlkit.distributed.exchange import gather_lists
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, first_line
from dmlkit.run_folder.checkpoint_file import load_weights
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.training.experiment import Experiment
from dmlkit.vectors.trained import ALIGNED, FROZEN, take_weights


class CheckpointWriter:
    """Writer of a run's checkpoints, one after the other; closing it waits until all of them are on the disk.

    On 2 CPU cores and a virtual disk the last checkpoint of ResNet-50 takes 0.3 to 0.7 s (272 MB) and that of ViT-B 1.2
    to 3.8 s (983 MB). This is negligible compared with an epoch there, but a tenth of an epoch of a few thousand images
    on a large GPU.

    Args:
        in_background: copy the state to main memory and write it while training continues; otherwise block.
    """

    def __init__(self, run: RunFolder, *, in_background: bool) -> None:
        self.run = run
        self._thread = ThreadPoolExecutor(1) if in_background else None
        self._writes: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            if self._thread:
                self._thread.shutdown()

    def write(self, name: CheckpointName, state: dict[str, Any]) -> None:
        """Write a checkpoint atomically."""
        if self._thread and not self.run.is_being_replaced():  # that first checkpoint moves the run's files
            self._writes.append(self._thread.submit(self.run.save_checkpoint, name, copy_to_cpu(state)))
        else:
            self.run.save_checkpoint(name, state)

    def wait(self) -> None:
        """Wait until all checkpoints are on the disk."""
        while self._writes:
            self._writes.popleft().result()


def copy_to_cpu(state: Any) -> Any:
    """Copy nested dictionaries and lists, with tensors in main memory."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        copied = copy(state)  # keeps the version metadata of torch's state dicts
        copied.update({key: copy_to_cpu(value) for key, value in state.items()})
        return copied
    if isinstance(state, list | tuple):
        return type(state)(copy_to_cpu(value) for value in state)
    return state


LATEST = "latest"
"""Key in the last checkpoint of the weights to resume from, where ``model`` holds their average."""


@dataclass
class State:
    """Progress of a training, apart from its weights."""

    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps of the current epoch
    loss_sums: list[float] = field(default_factory=list[float])  # over those: number with images, loss and its terms
    seconds: float = 0.0  # of training and validation, over all sessions
    best: dict[str, Any] | None = None  # epoch and validation metrics of the best checkpoint so far
    skipped: list[str] = field(default_factory=list[str])  # images that could not be read, without duplicates
    pretrained: str = ""  # fingerprint of the pretrained backbone before the first step, empty for random weights

    def note_skipped(self, faults: list[str]) -> None:
        """Record images that could not be read in training or evaluation."""
        self.skipped += [fault for fault in faults if fault not in self.skipped]


def save_best(experiment: Experiment, writer: CheckpointWriter, ranks: Ranks, state: State) -> None:
    """Write the best checkpoint: the weights of the model and of its loss."""
    weights = _weights(experiment)
    if ranks.is_global_zero:
        writer.write("best", {**weights, "epoch": state.epoch})


def save(experiment: Experiment, writer: CheckpointWriter, ranks: Ranks, state: State) -> None:
    """Write the last checkpoint. It has everything that the rest of the run depends on, for any number of ranks."""
    weights, optimizer = _weights(experiment), _optimizer_state(experiment)
    latest = experiment.average.model_weights if experiment.average else {}
    state.skipped = list(dict.fromkeys(gather_lists(ranks, state.skipped)))
    if ranks.is_global_zero:
        random = {"cpu": torch.get_rng_state()}
        if ranks.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(ranks.device)
        writer.write(
            "last",
            {
                **weights,
                LATEST: {name: weight.detach() for name, weight in latest.items()},
                **asdict(state),
                "optimizer": optimizer,
                "precision": {} if ranks.scaler is None else ranks.scaler.state_dict(),
                "random": random,
                "sampler": experiment.sampler.state(),
            },
        )
    ranks.barrier()


def restore(experiment: Experiment, run: RunFolder, ranks: Ranks) -> State:
    """Load the last checkpoint into the experiment. A run that has no checkpoint yet starts from the beginning."""
    path, rows = run.checkpoint_path("last"), run.read_metrics()
    if not path.exists():
        # A kill in the first epoch may come after best.pt and after its row but before last.pt: neither proves a loss.
        finished = run.summary_path if run.summary_path.exists() else run.metrics_path if len(rows) > 1 else None
        if finished:
            raise UserError(
                f"{path}: missing, though {finished} has finished epochs; restore the file, or retrain with --overwrite"
            )
        run.checkpoints.mkdir(exist_ok=True)  # Git and some copies of a run leave out an empty folder
        return State()
    saved = run.load_checkpoint("last")
    if saved["best"] and not (best := run.checkpoint_path("best")).exists():
        raise UserError(
            f"{best}: missing, though epoch {saved['best']['epoch']} was the best by {path}; restore the file, or "
            "retrain with --overwrite"
        )
    if [row.epoch for row in rows[: saved["epoch"]]] != list(range(1, saved["epoch"] + 1)):
        raise UserError(
            f"{run.metrics_path}: does not have one row for each of the {saved['epoch']} finished epochs of {path}; "
            "restore the file, or retrain with --overwrite"
        )
    try:
        return _load_into(experiment, saved, path, ranks)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # each part of torch raises another kind
        raise UserError(
            f"{path}: does not fit this run ({first_line(error)}); restore the file, or retrain with --overwrite"
        ) from error


def _load_into(experiment: Experiment, saved: dict[str, Any], path: Path, ranks: Ranks) -> State:
    """Load a checkpoint into the experiment."""
    for sharded in experiment.objective.sharded_parameters():
        whole = saved["objective"][sharded.name]
        saved["objective"][sharded.name] = sharded.shard.own_rows(whole)
        moments = saved["optimizer"]["state"].get(_index(experiment, sharded.values), {})
        moments.update(
            {name: sharded.shard.own_rows(value) for name, value in moments.items() if value.shape == whole.shape}
        )
    take_weights(experiment.model, saved, path)
    load_weights(experiment.objective, saved["objective"], path)
    if experiment.average:
        experiment.average.restore(saved["model"], saved[LATEST])
    experiment.optimizer.load_state_dict(saved["optimizer"])
    if ranks.scaler is not None:
        ranks.scaler.load_state_dict(saved["precision"])
    experiment.sampler.restore(saved["sampler"])
    torch.set_rng_state(saved["random"]["cpu"])
    if ranks.device.type == "cuda" and "cuda" in saved["random"]:
        torch.cuda.set_rng_state(saved["random"]["cuda"], ranks.device)
    return State(**{name: saved[name] for name in State.__dataclass_fields__})


def _weights(experiment: Experiment) -> dict[str, Any]:
    objective = experiment.objective.state_dict()
    for sharded in experiment.objective.sharded_parameters():
        objective[sharded.name] = sharded.shard.collect(sharded.values)
    model = experiment.model.state_dict()
    model |= experiment.average.averages if experiment.average else {}
    weights: dict[str, Any] = {
        "recipe": experiment.recipe_text,
        "num_features": experiment.train.num_features,
        "model": model,
        "objective": objective,
    }
    if experiment.objective.aligned_to:
        weights[ALIGNED] = experiment.objective.aligned_to
    if experiment.frozen_pretrained is not None:
        weights[FROZEN] = experiment.frozen_pretrained
        for name in experiment.model.frozen_weights():
            del model[name]
    return weights


def _optimizer_state(experiment: Experiment) -> dict[str, Any]:
    state = experiment.optimizer.state_dict()
    for sharded in experiment.objective.sharded_parameters():
        index = _index(experiment, sharded.values)
        state["state"][index] = {
            name: sharded.shard.collect(value) if value.shape == sharded.values.shape else value
            for name, value in state["state"].get(index, {}).items()
        }
    return state


def _index(experiment: Experiment, parameter: nn.Parameter) -> int:
    """Return the index of a parameter in the optimizer's state."""
    parameters = [id(other) for group in experiment.optimizer.param_groups for other in group["params"]]
    return parameters.index(id(parameter))
