"""Where training stands, on disk and back: everything that the rest of a run depends on."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from dmlkit.distributed.gather import gather_lists
from dmlkit.embedding.trained import FROZEN, take_weights
from dmlkit.errors import UserError
from dmlkit.recipe.file import dump_recipe
from dmlkit.run_folder.checkpoint_file import load_weights
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.checkpoint_writer import CheckpointWriter
from dmlkit.training.experiment import Experiment

LATEST = "latest"
"""Key of the last checkpoint: the weights to go on from, where its model has their average."""


@dataclass
class State:
    """Where training stands, beside the weights."""

    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps of the epoch under way
    loss_sum: float = 0.0  # over those steps
    seconds: float = 0.0  # of training and validation, over all sessions
    best: dict[str, Any] | None = None  # epoch and validation metrics of the best checkpoint
    skipped: list[str] = field(default_factory=list[str])  # images that could not be read, each once

    def note_skipped(self, faults: list[str]) -> None:
        """Remember images that could not be read, in training or evaluation."""
        self.skipped += [fault for fault in faults if fault not in self.skipped]


def save_best(experiment: Experiment, writer: CheckpointWriter, fabric: Fabric, state: State) -> None:
    """Write the best checkpoint: what a model needs to embed, and its loss to go on."""
    weights = _weights(experiment)
    if fabric.is_global_zero:
        writer.write("best", {**weights, "epoch": state.epoch})


def save(experiment: Experiment, writer: CheckpointWriter, fabric: Fabric, state: State) -> None:
    """Write the last checkpoint: everything that the rest of the run depends on, whatever the number of ranks."""
    weights, optimizer = _weights(experiment), _optimizer_state(experiment)
    state.skipped = list(dict.fromkeys(gather_lists(fabric, state.skipped)))
    if fabric.is_global_zero:
        random = {"cpu": torch.get_rng_state()}
        if fabric.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(fabric.device)
        writer.write(
            "last",
            {
                **weights,
                LATEST: _latest_weights(experiment),
                **asdict(state),
                "optimizer": optimizer,
                "precision": fabric.strategy.precision.state_dict(),
                "random": random,
            },
        )
    fabric.barrier()


def restore(experiment: Experiment, run: RunFolder, fabric: Fabric) -> State:
    """Load the last checkpoint into the experiment; a run stopped before its first checkpoint starts again.

    Raises:
        UserError: the checkpoint is gone though epochs are finished, or it cannot be read, or does not fit the run.
    """
    path, rows = run.checkpoint_path("last"), run.read_metrics()
    if not path.exists():
        # A kill in the first epoch may come after best.pt and after its row, and before last.pt: neither is a proof.
        finished = run.summary_path if run.summary_path.exists() else run.metrics_path if len(rows) > 1 else None
        if finished:
            raise UserError(
                f"{path}: missing, though {finished} has finished epochs; restore the file, or retrain with --overwrite"
            )
        return State()
    saved = run.load_checkpoint("last")
    if [row.epoch for row in rows[: saved["epoch"]]] != list(range(1, saved["epoch"] + 1)):
        raise UserError(
            f"{run.metrics_path}: lacks rows of the {saved['epoch']} epochs that {path} has finished; bring it back, "
            "or train anew with --overwrite"
        )
    try:
        return _take_over(experiment, saved, path, fabric)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # torch's, each part has its own kind
        told = (str(error).splitlines() or [""])[0]
        raise UserError(f"{path}: does not fit this run ({told}); bring it back, or train anew") from error


def _take_over(experiment: Experiment, saved: dict[str, Any], path: Path, fabric: Fabric) -> State:
    """Put a checkpoint into the experiment."""
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
    fabric.strategy.precision.load_state_dict(saved["precision"])
    torch.set_rng_state(saved["random"]["cpu"])
    if fabric.device.type == "cuda" and "cuda" in saved["random"]:
        torch.cuda.set_rng_state(saved["random"]["cuda"], fabric.device)
    return State(**{name: saved[name] for name in State.__dataclass_fields__})


def _weights(experiment: Experiment) -> dict[str, Any]:
    objective = experiment.objective.state_dict()
    for sharded in experiment.objective.sharded_parameters():
        objective[sharded.name] = sharded.shard.collect(sharded.values)
    recipe, model = dump_recipe(experiment.recipe), experiment.model.state_dict()
    model |= experiment.average.weights() if experiment.average else {}
    weights = {
        "recipe": recipe,
        "num_features": experiment.train.num_features,
        "model": model,
        "objective": objective,
    }
    if experiment.frozen_pretrained is None:
        return weights
    for name in experiment.model.frozen_weights():
        del model[name]
    return {**weights, FROZEN: experiment.frozen_pretrained}


def _latest_weights(experiment: Experiment) -> dict[str, Tensor]:
    """Where the last step left the weights of which the checkpoint's model has the average."""
    latest = experiment.average.model_weights if experiment.average else {}
    return {name: weight.detach() for name, weight in latest.items()}


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
    """Of a parameter in the optimizer's state."""
    parameters = [id(other) for group in experiment.optimizer.param_groups for other in group["params"]]
    return parameters.index(id(parameter))
