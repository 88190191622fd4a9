"""The end of a run: its checkpoints scored on the test classes."""

from lightning_fabric import Fabric

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.gather import gather_lists
from dmlkit.embedding.trained import take_weights
from dmlkit.evaluation.evaluate import evaluate
from dmlkit.files.atomic import atomic_write
from dmlkit.loading.cache import images_of_split
from dmlkit.run_folder.documents import ScoredCheckpoint, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.checkpoint import State
from dmlkit.training.curves import plot_curves
from dmlkit.training.experiment import Experiment


def summarize(experiment: Experiment, run: RunFolder, fabric: Fabric, state: State) -> Summary:
    """Score the last and the best checkpoint on the test classes and write ``summary.json`` and the curves."""
    rows = run.read_metrics()
    test = images_of_split(experiment.recipe.dataset, "test")
    last = ScoredCheckpoint(
        epoch=state.epoch, validation=rows[-1].validation, test=test_metrics(experiment, fabric, test, state)
    )
    best = None
    if state.best is not None:
        final = {name: tensor.clone() for name, tensor in experiment.model.state_dict().items()}
        take_weights(experiment.model, run.load_checkpoint("best"), run.checkpoint_path("best"))
        best = ScoredCheckpoint(
            epoch=state.best["epoch"],
            validation=state.best["metrics"],
            test=test_metrics(experiment, fabric, test, state),
        )
        experiment.model.load_state_dict(final)
    summary = Summary(
        last=last,
        best=best,
        selected_by=experiment.recipe.training.select_by if best else None,
        seconds=round(state.seconds, 1),
        images_per_second=rows[-1].images_per_second,
        skipped_images=tuple(sorted(set(gather_lists(fabric, state.skipped)))),
    )
    if fabric.is_global_zero:
        with atomic_write(run.curves_path) as partial:
            plot_curves(rows, partial)
        summary.write(run.summary_path)  # last: with it a run counts as complete
    return summary


def test_metrics(experiment: Experiment, fabric: Fabric, test: Dataset, state: State) -> dict[str, float]:
    """Metrics of the current weights on the test classes."""
    evaluation = evaluate(fabric, experiment.model, test, experiment.recipe, split="test")
    state.note_skipped(evaluation.faults)
    return evaluation.scores.values
