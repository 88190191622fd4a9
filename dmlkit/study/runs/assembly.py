"""What a study would train, built before anything trains."""

from pathlib import Path

from dmlkit.errors import UserError
from dmlkit.recipe.schema import Recipe
from dmlkit.study.definition.config import Study
from dmlkit.study.protocol import ProtocolName, fold_recipe
from dmlkit.training.experiment import Experiment, assemble


def check_components(study: Study, folder: Path) -> dict[str, int]:
    """Build the components of every variant that has no run yet: what does not fit is told before anything trains.

    Returns:
        How many validation classes each of them has, by the name of the variant.

    Raises:
        UserError: with the name of the variant.
    """
    classes: dict[str, int] = {}
    for variant in study.variants:
        if (folder / "runs" / variant.name).exists():
            continue
        try:
            validation = check_recipe(study.config.protocol, variant.candidates[0].recipe).validation
        except UserError as error:
            raise UserError(f"{variant.name}: {error}") from error
        classes[variant.name] = len(validation.class_names) if validation else 0
    return classes


def check_recipe(protocol: ProtocolName, recipe: Recipe) -> Experiment:
    """Build the components of a recipe, of the Reality Check those of its first model.

    Raises:
        UserError: they do not fit together, or the data is missing.
    """
    return assemble(fold_recipe(recipe, 0) if protocol == "reality_check" else recipe)
