"""Training in one visible loop, which can stop after any step and resumes to bit-identical weights."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from math import isfinite
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from dmlkit.distributed.exchange import gather_counts, gather_rows
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.distributed.stopping import TrainingStoppedError, stop_signals
from dmlkit.errors import UserError, first_line, killed_reader, out_of_memory, warn
from dmlkit.evaluation.evaluate import Evaluation, evaluate
from dmlkit.loading.batches import TimedBatches, TrainingBatches, make_loader
from dmlkit.loading.inputs import refuse_faults, refuse_nothing_read
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.plugin import plugin_error
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import Basis, EpochRow, RunClasses, Summary
from dmlkit.run_folder.folder import RunFolder, check_one_way
from dmlkit.training.checkpoint import CheckpointWriter, State, restore, save, save_best
from dmlkit.training.data import TrainingData, check_disk, check_places, feature_jobs, remove_maps, teach, training_data
from dmlkit.training.experiment import Experiment, assemble
from dmlkit.training.pretrained import pretrained_fingerprint, score_pretrained
from dmlkit.training.progress import Progress, Silent, mirror_to_loggers
from dmlkit.training.summary import forget_peak_memory, peak_memory, summarize
from dmlkit.vectors.in_memory import share_loader
from dmlkit.vectors.trained import files_of_run

LESS_MEMORY = (
    "take smaller batches, or set training.precision=bf16, training.gradient_checkpointing=true or "
    "training.gradient_cache"
)
ALONE = RLock()  # trainings in two threads would draw from one generator, torch's, and change each other's weights
if hasattr(os, "register_at_fork"):  # a process has no other training, whatever a thread of its parent was doing
    os.register_at_fork(after_in_child=lambda: globals().update(ALONE=RLock()))
CHECK_EVERY = 20  # steps between two checks of the loss on a GPU, which each check stalls; on a CPU every step


def train(
    recipe: Recipe | str | Path,
    folder: str | Path,
    *,
    overrides: Sequence[str] = (),
    device: str | Ranks = "auto",
    progress: Progress | None = None,
    resume: bool = False,
    overwrite: bool = False,
    basis: Basis | None = None,
) -> Summary:
    """Train a recipe into a run folder. Trainings in threads of one process wait for each other.

    Args:
        recipe: a recipe, or its YAML file, or the name of a recipe that comes with dmlkit.
        folder: the run folder; see `RunFolder`.
        overrides: changes of a file or a recipe that comes with dmlkit, each ``key.subkey=value``.
        device: a device, see `start_ranks`, or what that has returned.
        progress: receives steps and epochs.
        resume: continue the run in ``folder`` from its last checkpoint, or start it if it has none yet.
        overwrite: replace the run in ``folder`` and everything that was made with its weights.
        basis: the run whose figures stand for the model, if every class is trained on; see ``dmlkit final``.

    Raises:
        UserError: the recipe, the data or the folder is not usable, training diverged, a plug-in raised an error, or a
            rank ended.
        TrainingStoppedError: Ctrl-C or SIGTERM stopped the run after a checkpoint.
    """
    check_one_way(resume=resume, overwrite=overwrite)
    if not isinstance(recipe, Recipe):
        recipe = read_recipe(Path(recipe), overrides)
    elif overrides:
        raise UserError(f"train: overrides {overrides!r} apply to a file or a name, got a Recipe; see read_recipe")
    ranks = start_ranks(device, recipe.training.precision) if isinstance(device, str) else device
    run = RunFolder(Path(folder))
    check_places(recipe, run.path)
    lock = run.lock_for_training() if ranks.is_global_zero else nullcontext()
    with lock, ALONE, mirror_to_loggers(progress or Silent(), recipe, run, ranks) as progress:
        try:
            return _train(recipe, run, ranks, progress, resume=resume, overwrite=overwrite, basis=basis)
        except Exception as error:
            if named := plugin_error(error):
                raise named from error
            raise


def _train(
    recipe: Recipe,
    run: RunFolder,
    ranks: Ranks,
    progress: Progress,
    *,
    resume: bool,
    overwrite: bool,
    basis: Basis | None,
) -> Summary:
    ranks.barrier()  # the first rank has locked the folder
    resume = resume and run.holds_run()
    ranks.barrier()  # all ranks have checked before the first one creates the run
    if resume:
        run.check_same_recipe(recipe)
    dataset = recipe.dataset.of_run(run.classes() if resume else None)
    recipe = recipe.model_copy(update={"dataset": dataset})
    origin = run if resume else RunFolder(Path(basis.run)) if basis else None
    with files_of_run(origin) if origin else nullcontext():
        experiment = assemble(recipe, ranks.global_rank, ranks.world_size)
    classes = classes_of(experiment)
    if resume and run.classes_path.exists():
        run.check_same_classes(classes)
    if experiment.sampler.batch_size % ranks.world_size:
        text = f"a batch of {experiment.sampler.batch_size} images cannot be divided by {ranks.world_size} ranks"
        raise UserError(recipe.fault(("sampler",), text))
    jobs = feature_jobs(experiment, ranks, run if resume else None)
    if ranks.is_global_zero:
        check_disk(recipe, jobs, run, resume=resume)
        device = str(ranks.device)
        run.write_recipe(recipe, basis) if resume else run.create(recipe, basis, overwrite=overwrite, device=device)
    if ranks.is_global_zero and not run.classes_path.exists():  # a kill may have come before it was written
        classes.write(run.classes_path)
    ranks.barrier()
    try:
        data = training_data(experiment, jobs, run, ranks, progress)
        teach(experiment, ranks, progress)
        score = cache(partial(score_pretrained, experiment, data, run, ranks, progress))
        state = fit(experiment, data, run, ranks, progress, resume, score)
        summary = summarize(experiment, data, run, ranks, state, score(state.pretrained))
        remove_maps(recipe, run, ranks)
        return summary
    except (RuntimeError, MemoryError) as error:
        if memory := out_of_memory(error):
            text = f"not enough memory for batches of {experiment.sampler.batch_size} images ({memory}); {LESS_MEMORY}"
            raise UserError(recipe.fault(("sampler",), text)) from error
        is_lost = isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)
        is_lost = is_lost and ranks.world_size > 1
        ended = f"another rank ended ({error})" if is_lost else killed_reader(error)
        if not ended:
            raise
        if run.is_being_replaced():
            advice = f"the previous run in {run.path} is unchanged; start again with the same command"
        else:
            advice = f"continue with the same command and --resume{' instead of --overwrite' if overwrite else ''}"
        raise UserError(f"{ended}; {advice}") from error


def classes_of(experiment: Experiment) -> RunClasses:
    """Return the classes of each split of an experiment, for its run to keep to."""
    validation, test = (part.class_names if part else () for part in (experiment.validation, experiment.test))
    images, names, known = len(experiment.train), experiment.train.class_names, experiment.recipe.dataset.known_images()
    return RunClasses(
        training_classes=names, validation_classes=validation, test_classes=test, images=images, known_images=known
    )


def fit(
    experiment: Experiment,
    data: TrainingData,
    run: RunFolder,
    ranks: Ranks,
    progress: Progress,
    resume: bool,
    score: Callable[[str], object],
) -> State:
    """Run the training loop. On return the last checkpoint has the final weights.

    ``score`` scores the pretrained backbone when it is first called: after the first epoch, so that nobody waits for it
    before the first step, and an image that cannot be read is reported before the others.
    """
    recipe, settings = experiment.recipe, experiment.recipe.training
    _move_model(experiment, ranks)
    objective = experiment.objective.to(ranks.device)
    base_rates = [group["lr"] for group in experiment.optimizer.param_groups]
    batches = TrainingBatches(experiment.sampler, recipe.seed, rank=ranks.global_rank, ranks=ranks.world_size)
    on_gpu = ranks.device.type == "cuda"
    loader = TimedBatches(make_loader(data.training, batches, workers=settings.workers, pin_memory=on_gpu))
    validate = _validation(data, recipe, ranks)
    may_skip = recipe.dataset.on_bad_image == "skip"
    check_every = 1 if ranks.device.type == "cpu" else CHECK_EVERY

    state = _first_state(experiment, run, ranks, resume)
    data.model.train()
    model: Any = None
    forget_peak_memory(ranks.device)
    with stop_signals() as stop_requested, CheckpointWriter(run, in_background=on_gpu) as writer:
        while state.epoch < settings.trained_epochs:
            started = time.perf_counter()
            if experiment.model.backbone.set_epoch(state.epoch) or model is None:
                # data-parallel training waits for the gradients of all parameters that were trainable at its setup
                model = ranks.distribute(data.model)
            batches.epoch, batches.start = state.epoch, state.step * settings.accumulate
            objective.loss.set_epoch(state.epoch)
            experiment.sampler.set_epoch(state.epoch, experiment.model.manifold)
            losses: list[Tensor] = []  # of the current step, each with its terms: (1 + T,)
            pending: list[Tensor] = []  # losses of steps that are not checked yet
            images_seen = images_pending = 0
            for number, batch in enumerate(loader, batches.start + 1):
                refuse_faults(batch.faults, recipe.dataset.on_bad_image)
                state.note_skipped(batch.faults)
                counts = gather_counts(ranks, len(batch.labels), differ=may_skip)
                is_last = number % settings.accumulate == 0 or number == len(experiment.sampler)  # batch of its step
                if all(counts):  # a rank without an image has no gradient to average: all ranks skip the batch
                    with ranks.without_sync(model, enabled=not is_last and not may_skip):
                        inputs = batch.inputs.to(ranks.device, non_blocking=True)
                        embeddings = gather_rows(ranks, ranks.compute(model, inputs), counts)
                        labels = gather_rows(ranks, batch.labels.to(ranks.device, non_blocking=True), counts)
                        images = gather_rows(ranks, batch.indices.to(ranks.device, non_blocking=True), counts)
                        loss = compute_loss(experiment, (embeddings, labels, images), state, run)
                        ranks.backward(loss)
                    points = embeddings.detach()[:, : experiment.model.manifold.point_dim]  # not those before a neck
                    experiment.sampler.learn_from(points, labels, experiment.model.manifold)
                    losses.append(torch.stack([loss.detach(), *objective.terms.values()]))
                    images_pending += len(labels)
                if not is_last:
                    continue
                if losses:
                    factor = recipe.schedule.factor(state.epoch + state.step / experiment.steps, settings.epochs)
                    take_step(ranks, experiment, len(losses), [rate * factor for rate in base_rates])
                    pending.append(torch.stack(losses).mean(0))
                    losses.clear()
                state.step += 1
                if len(pending) >= check_every or state.step == experiment.steps:
                    last_loss = check_losses(pending, state, run)
                    images_seen += images_pending
                    share = state.step / experiment.steps
                    progress.step(epoch=state.epoch, progress=share, loss=last_loss, images=images_pending)
                    images_pending = 0
                    if stop_requested(ranks) and state.step < experiment.steps:
                        state.seconds += time.perf_counter() - started
                        save(experiment, writer, ranks, state)
                        raise TrainingStoppedError(f"stopped in epoch {state.epoch + 1} after step {state.step}")
            refuse_nothing_read(len(state.loss_sums), state.skipped, "the training split")
            check_weights(experiment, state, run)
            pace = Pace(images_seen, time.perf_counter() - started, loader.seconds, is_whole=batches.start == 0)
            row = finish_epoch(experiment, validate, writer, ranks, state, pace)
            state.seconds += time.perf_counter() - started
            save(experiment, writer, ranks, state)
            progress.epoch(row)
            if stop_requested(ranks) and state.epoch < settings.trained_epochs:
                raise TrainingStoppedError(f"stopped after epoch {state.epoch}")
            score(state.pretrained)
    ranks.barrier()  # all checkpoints are on the disk
    return state


def _validation(data: TrainingData, recipe: Recipe, ranks: Ranks) -> Callable[[], Evaluation] | None:
    """Return a function that evaluates the validation classes, if there are any, always by the same readers.

    Starting readers costs a training on a CPU the memory that it keeps: it went on with 37 images/s instead of 51.
    """
    if (dataset := data.validation) is None:
        return None
    loader = share_loader(ranks, dataset, recipe.transform, range(len(dataset)), recipe.training.workers)
    return partial(evaluate, ranks, data.model, dataset, recipe, split="validation", loader=loader)


def _move_model(experiment: Experiment, ranks: Ranks) -> None:
    """Move the model to its device; compile its backbone if the recipe says so, where there is a C++ compiler."""
    if experiment.recipe.training.compile:
        try:
            torch.compile(nn.ReLU())(torch.ones(2, device=ranks.device))
            experiment.model.backbone.compile()
        except Exception as error:  # of a class that PyTorch keeps to itself
            warn(f"training.compile: trains without it, because torch.compile fails here: {first_line(error)}")
    experiment.model.to(ranks.device)


def _first_state(experiment: Experiment, run: RunFolder, ranks: Ranks, resume: bool) -> State:
    """Return the state of the last checkpoint, or of a new run; rows of metrics after it are removed."""
    state = restore(experiment, run, ranks) if resume else State()
    state.pretrained = state.pretrained or pretrained_fingerprint(experiment)
    if ranks.is_global_zero:
        run.keep_metrics(state.epoch)
        if state.epoch < experiment.recipe.training.trained_epochs:
            run.summary_path.unlink(missing_ok=True)  # a finished run that trains further is not finished
    return state


class Pace(NamedTuple):
    """Speed of one epoch."""

    images: int
    seconds: float  # without validation
    waiting: float  # seconds of these in which training waited for a batch
    is_whole: bool  # the epoch was not interrupted


def finish_epoch(
    experiment: Experiment,
    validate: Callable[[], Evaluation] | None,
    writer: CheckpointWriter,
    ranks: Ranks,
    state: State,
    pace: Pace,
) -> EpochRow:
    """Validate, write the row of the epoch, and save the checkpoint if it is the best so far."""
    writer.wait()  # every epoch in metrics.jsonl has a checkpoint, except the last one
    settings, schedule, steps = experiment.recipe.training, experiment.recipe.schedule, experiment.steps
    loss, *terms = (total / state.loss_sums[0] for total in state.loss_sums[1:])
    state.epoch, state.step, state.loss_sums = state.epoch + 1, 0, []
    metrics: dict[str, float] | None = None
    is_last = state.epoch == settings.trained_epochs
    if validate and (state.epoch % settings.validate_every == 0 or is_last):
        with experiment.average.in_place() if experiment.average else nullcontext():
            evaluation = validate()
        state.note_skipped(evaluation.faults)
        metrics = evaluation.scores.values
        if state.best is None or metrics[settings.select_by] > state.best["metrics"][settings.select_by]:
            state.best = {"epoch": state.epoch, "metrics": metrics}
            save_best(experiment, writer, ranks, state)
    row = EpochRow(
        epoch=state.epoch,
        loss=loss,
        terms=dict(zip(experiment.objective.terms, terms, strict=True)) or None,
        lr=experiment.recipe.optimizer.lr * schedule.factor(state.epoch - 1 + (steps - 1) / steps, settings.epochs),
        images_per_second=round(pace.images / pace.seconds, 1),
        waiting=round(pace.waiting / pace.seconds, 3),
        seconds=round(state.seconds + pace.seconds, 2),
        validation=metrics,
        training_seconds=round(pace.seconds, 3) if pace.is_whole else None,
        peak_memory_bytes=peak_memory(ranks.device),
    )
    if ranks.is_global_zero:
        writer.run.append_metrics(row)
    return row


def take_step(ranks: Ranks, experiment: Experiment, batches: int, rates: list[float]) -> None:
    """Update the weights, and their average where one is kept, and clear the gradients, which are sums over batches.

    Each parameter group gets its learning rate from ``rates``.
    """
    for group, rate in zip(experiment.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        for weight in group["params"] if batches > 1 else ():  # a number that is known after the last batch was read
            if weight.grad is not None:
                weight.grad.div_(batches)
    average_gradients(ranks, experiment)
    clip_gradients(ranks, experiment)
    ranks.step(experiment.optimizer)
    experiment.optimizer.zero_grad()
    if experiment.average:
        experiment.average.update()


def average_gradients(ranks: Ranks, experiment: Experiment) -> None:
    """Average the gradients of the proxies over ranks; they differ only by rounding, but the proxies would drift apart.

    Sharded proxies, which only one rank holds, keep their gradients.
    """
    if ranks.world_size == 1:
        return
    sharded_ids = {id(sharded.values) for sharded in experiment.objective.sharded_parameters()}
    for parameter in experiment.objective.parameters():
        if parameter.grad is not None and id(parameter) not in sharded_ids:
            ranks.sum(parameter.grad).div_(ranks.world_size)


def clip_gradients(ranks: Ranks, experiment: Experiment) -> None:
    """Clip the gradients of model and objective by their total norm or by value, as the recipe says."""
    settings = experiment.recipe.training
    if settings.clip_grad_norm is None and settings.clip_grad_value is None:
        return
    ranks.unscale(experiment.optimizer)
    weights = [weight for group in experiment.optimizer.param_groups for weight in group["params"]]
    if settings.clip_grad_norm is not None:
        every_sharded = experiment.objective.sharded_parameters()
        with_gradient = [sharded for sharded in every_sharded if sharded.values.grad is not None]
        if not with_gradient:
            # the training loop checks for non-finite values itself, and rarely: each check stalls a GPU
            clip_grad_norm_(weights, settings.clip_grad_norm)
        else:  # the norm over the rows of all ranks
            sharded_ids = {id(sharded.values) for sharded in with_gradient}
            gradients = [p.grad for p in weights if p.grad is not None and id(p) not in sharded_ids]
            total = get_total_norm(gradients).square()
            for sharded in with_gradient:
                assert sharded.values.grad is not None
                total = total + sharded.shard.sum(sharded.values.grad.norm().square())
            clip_grads_with_norm_(weights, settings.clip_grad_norm, total.sqrt())
    if settings.clip_grad_value is not None:
        clip_grad_value_(weights, settings.clip_grad_value)


def compute_loss(experiment: Experiment, batch: tuple[Tensor, Tensor, Tensor], state: State, run: RunFolder) -> Tensor:
    """Compute the loss of a batch: its embeddings (B, D), labels (B,), and rows (B,) in the training split."""
    recipe = experiment.recipe
    try:
        loss = experiment.objective(*batch)
    except ValueError as error:
        if batch[0].isfinite().all():
            raise UserError(recipe.fault(("loss",), str(error))) from error
        raise diverged(state.step + 1, "embeddings", state, run) from error
    if not loss.requires_grad:  # of a plug-in
        names = " + ".join(term.name for term in (recipe.loss, *recipe.regularizers))
        raise UserError(recipe.fault(("loss",), f"{names} returned a tensor without a gradient; remove its detach()"))
    return loss


def check_losses(pending: list[Tensor], state: State, run: RunFolder) -> float:
    """Add the pending losses and their terms to the state, clear them, and return the last loss."""
    rows: list[list[float]] = torch.stack(pending).tolist() if pending else []
    for offset, row in enumerate(rows):
        if not isfinite(row[0]):
            raise diverged(state.step - len(rows) + offset + 1, f"losses ({row[0]})", state, run)
        sums = state.loss_sums or [0.0] * (1 + len(row))
        state.loss_sums = [total + value for total, value in zip(sums, (1.0, *row), strict=True)]
    pending.clear()
    return rows[-1][0] if rows else float("nan")


def check_weights(experiment: Experiment, state: State, run: RunFolder) -> None:
    """Check that all weights are finite, before they overwrite a good checkpoint."""
    parameters = [*experiment.model.parameters(), *experiment.objective.parameters()]
    if not torch.stack([parameter.detach().isfinite().all() for parameter in parameters]).all():
        raise diverged(state.step, "weights", state, run)


def diverged(step: int, what: str, state: State, run: RunFolder) -> UserError:
    """Return the error of a run that diverged."""
    last, text = run.checkpoint_path("last"), "no checkpoint was written yet"
    if run.is_being_replaced():
        text = f"the previous run in {run.path} is unchanged"
    elif state.epoch or last.exists():
        text = f"the last good checkpoint is {last}"
    return UserError(
        f"epoch {state.epoch + 1}, step {step}: {what} are not finite; {text}. "
        "Lower optimizer.lr, set training.clip_grad_norm, or add schedule.warmup_epochs"
    )
