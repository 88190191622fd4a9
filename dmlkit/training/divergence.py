"""Divergence: a run stops at the first number that is not finite, before it overwrites a good checkpoint."""

import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.checkpoint import State
from dmlkit.training.experiment import Experiment


def compute_loss(experiment: Experiment, embeddings: Tensor, labels: Tensor, state: State, run: RunFolder) -> Tensor:
    """The loss of a batch; embeddings that are no longer finite end the run with the step's number.

    Raises:
        UserError: the loss objects to the batch, or the embeddings are not finite.
    """
    try:
        return experiment.objective(embeddings, labels)
    except ValueError as error:
        if embeddings.isfinite().all():
            raise UserError(experiment.recipe.fault(("loss",), str(error))) from error
        raise diverged(state.step + 1, "embeddings", state, run) from error


def check_losses(pending: list[Tensor], state: State, run: RunFolder) -> float:
    """Add the pending losses up and clear them; returns the last. Stops at the first that is not finite."""
    losses = torch.stack(pending).tolist() if pending else []
    for offset, loss in enumerate(losses):
        if loss != loss or abs(loss) == float("inf"):
            raise diverged(state.step - len(losses) + offset + 1, f"losses ({loss})", state, run)
        state.loss_sum += loss
    pending.clear()
    return losses[-1] if losses else float("nan")


def check_weights(experiment: Experiment, state: State, run: RunFolder) -> None:
    """Stop before weights that are not finite overwrite a good checkpoint."""
    parameters = [*experiment.model.parameters(), *experiment.objective.parameters()]
    if not torch.stack([parameter.detach().isfinite().all() for parameter in parameters]).all():
        raise diverged(state.step, "weights", state, run)


def diverged(step: int, what: str, state: State, run: RunFolder) -> UserError:
    """The error of a run that has come to nothing."""
    last = run.checkpoint_path("last")
    if run.is_being_replaced():
        kept = f"the run that was in {run.path} stays as it was"
    else:
        kept = (
            f"the last good checkpoint is {last}" if state.epoch or last.exists() else "no checkpoint was written yet"
        )
    return UserError(
        f"epoch {state.epoch + 1}, step {step}: {what} that are not finite; {kept}. "
        "Lower optimizer.lr, set training.clip_grad_norm, or add schedule.warmup_epochs"
    )
