"""Loss, gradients and optimizer step: gradients are averaged over batches and ranks, clipped, and checked."""

from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dmlkit.errors import UserError
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.checkpoint import State
from dmlkit.training.experiment import Experiment


def take_step(fabric: Fabric, experiment: Experiment, optimizer: Any, batches: int, rates: list[float]) -> None:
    """Update the weights, and their average where one is kept, and clear the gradients, which are sums over batches.

    Each parameter group gets its learning rate from ``rates``.
    """
    for group, rate in zip(experiment.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    average_over_batches(experiment, batches)
    average_gradients(fabric, experiment)
    clip_gradients(fabric, experiment, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    if experiment.average:
        experiment.average.update()


def average_over_batches(experiment: Experiment, batches: int) -> None:
    """Divide the summed gradients by the number of batches, which is known only after the last batch was read."""
    if batches == 1:
        return
    for group in experiment.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.div_(batches)


def average_gradients(fabric: Fabric, experiment: Experiment) -> None:
    """Average the gradients of the proxies over ranks; they differ only by rounding, but the proxies would drift apart.

    Sharded proxies, which only one rank holds, keep their gradients.
    """
    if fabric.world_size == 1:
        return
    alone = {id(sharded.values) for sharded in experiment.objective.sharded_parameters()}
    for parameter in experiment.objective.parameters():
        if parameter.grad is not None and id(parameter) not in alone:
            parameter.grad = fabric.all_reduce(parameter.grad, reduce_op="mean")  # pyright: ignore[reportAttributeAccessIssue]


def clip_gradients(fabric: Fabric, experiment: Experiment, optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients of model and objective by their total norm or by value, as the recipe says."""
    settings = experiment.recipe.training
    everything = nn.ModuleList([experiment.model, experiment.objective])
    if settings.clip_grad_norm is not None:
        every_sharded = experiment.objective.sharded_parameters()
        with_gradient = [sharded for sharded in every_sharded if sharded.values.grad is not None]
        if not with_gradient:
            # the training loop checks for non-finite values itself, and rarely: each check stalls a GPU
            fabric.clip_gradients(everything, optimizer, max_norm=settings.clip_grad_norm, error_if_nonfinite=False)
        else:  # the norm over the rows of all ranks
            alone = {id(sharded.values) for sharded in with_gradient}
            rest = [p.grad for p in everything.parameters() if p.grad is not None and id(p) not in alone]
            total = get_total_norm(rest).square()
            for sharded in with_gradient:
                assert sharded.values.grad is not None
                total = total + sharded.shard.sum(sharded.values.grad.norm().square())
            clip_grads_with_norm_(everything.parameters(), settings.clip_grad_norm, total.sqrt())
    if settings.clip_grad_value is not None:
        fabric.clip_gradients(everything, optimizer, clip_val=settings.clip_grad_value)


def compute_loss(experiment: Experiment, embeddings: Tensor, labels: Tensor, state: State, run: RunFolder) -> Tensor:
    """Compute the loss of a batch.

    Raises:
        UserError: the loss rejects the batch, or the embeddings are not finite.
    """
    try:
        return experiment.objective(embeddings, labels)
    except ValueError as error:
        if embeddings.isfinite().all():
            raise UserError(experiment.recipe.fault(("loss",), str(error))) from error
        raise diverged(state.step + 1, "embeddings", state, run) from error


def check_losses(pending: list[Tensor], state: State, run: RunFolder) -> float:
    """Add the pending losses to the state, clear them, and return the last one.

    Raises:
        UserError: a loss is not finite.
    """
    losses = torch.stack(pending).tolist() if pending else []
    for offset, loss in enumerate(losses):
        if loss != loss or abs(loss) == float("inf"):
            raise diverged(state.step - len(losses) + offset + 1, f"losses ({loss})", state, run)
        state.loss_sum += loss
    pending.clear()
    return losses[-1] if losses else float("nan")


def check_weights(experiment: Experiment, state: State, run: RunFolder) -> None:
    """Check that all weights are finite, before they overwrite a good checkpoint.

    Raises:
        UserError: a weight is not finite.
    """
    parameters = [*experiment.model.parameters(), *experiment.objective.parameters()]
    if not torch.stack([parameter.detach().isfinite().all() for parameter in parameters]).all():
        raise diverged(state.step, "weights", state, run)


def diverged(step: int, what: str, state: State, run: RunFolder) -> UserError:
    """Return the error of a run that diverged."""
    last = run.checkpoint_path("last")
    if run.is_being_replaced():
        kept = f"the previous run in {run.path} is unchanged"
    else:
        kept = (
            f"the last good checkpoint is {last}" if state.epoch or last.exists() else "no checkpoint was written yet"
        )
    return UserError(
        f"epoch {state.epoch + 1}, step {step}: {what} are not finite; {kept}. "
        "Lower optimizer.lr, set training.clip_grad_norm, or add schedule.warmup_epochs"
    )
