"""The last training: on every class of a run's dataset, for the epochs that validation chose in that run."""

from collections.abc import Sequence
from pathlib import Path

from dmlkit.embedding.trained import recipe_of
from dmlkit.errors import UserError
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import Alignment, Basis, Summary
from dmlkit.run_folder.folder import RunFolder


def final_recipe(path: Path, overrides: Sequence[str] = ()) -> tuple[Recipe, Basis]:
    """Return the recipe that trains on every class, and the run whose figures stand for its model.

    It is the recipe of a finished run with two changes. ``dataset.split`` is ``all``: training, validation and test
    classes are trained on. ``training.stop_after`` is the epoch of the run's best checkpoint on validation classes, or
    of its last one if it had none; the schedule of the learning rate still spans the epochs of the run, so that each
    epoch has the learning rate that it had there. An epoch passes over more images, thus has more steps.

    Args:
        path: folder of the run.
        overrides: changes of the run's dataset, which may have moved, each ``key=value``.

    Raises:
        UserError: there is no such run, it is not finished, it was aligned, or it was trained on every class itself.
    """
    run = RunFolder(path)
    recipe = recipe_of(run, overrides)
    if run.recipe().dataset.split == "all":
        basis = run.basis()
        instead = f"; use {basis.run}" if basis else ""
        raise UserError(f"{path}: was trained on every class already, expected a run with test classes{instead}")
    if run.alignment_path.exists():
        newer = Alignment.read(run.alignment_path).run
        raise UserError(
            f"{path}: was written by dmlkit align and was not trained itself; use {newer}, which was aligned"
        )
    if not run.summary_path.exists():
        raise UserError(f"{path}: is not finished, expected a summary.json; continue it with dmlkit train --resume")
    summary = Summary.read(run.summary_path)
    changes = {
        "dataset": recipe.dataset.model_copy(update={"split": "all"}),
        "training": recipe.training.model_copy(update={"stop_after": summary.chosen.epoch}),
    }
    selected_by = summary.selected_by or recipe.training.select_by
    return recipe.model_copy(update=changes), Basis(run=str(path), selected_by=selected_by, checkpoint=summary.chosen)
