"""Dataset for a path given by the user: a recipe, a folder or a table."""

from collections.abc import Sequence
from pathlib import Path

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.shards import holds_shards
from dmlkit.datasets.table import TableConfig
from dmlkit.errors import UserError
from dmlkit.recipe.file import read_recipe


def dataset_at(target: Path, dataset: str | None = None, overrides: Sequence[str] = ()) -> DatasetConfig:
    """Return the dataset of a recipe, or that of a folder or table, without holding out validation classes.

    Raises:
        UserError: there is no such folder, or the path is a file of another kind.
    """
    if target.suffix in (".yaml", ".yml"):
        if dataset is not None:
            raise UserError("--dataset applies only to folders; remove it, since a recipe names its dataset")
        return read_recipe(target, overrides).dataset
    if overrides:
        raise UserError(f"--set applies only to recipes, got {target}; remove it, or use a recipe")
    published = {name: kind.published for name, kind in DatasetConfig.variants.items() if kind.published is not None}
    if dataset is not None:
        known = [*sorted(published), "folder", "shards"]
        if dataset not in known:
            raise UserError(f"--dataset: got {dataset!r}, expected {', '.join(known)}")
        return DatasetConfig.variants[dataset](root=str(target), validation_fraction=0.0)
    if target.suffix.lower() in (".csv", ".parquet"):
        return TableConfig(file=str(target), validation_fraction=0.0)
    if target.exists() and not target.is_dir():
        raise UserError(
            f"{target}: unsupported kind of file; expected a recipe (.yaml), a table (.csv or .parquet), or a folder"
        )
    if not target.is_dir():
        lines = [line for benchmark in published.values() for line in benchmark.instructions(target)]
        raise UserError("\n".join([f"{target}: no such folder", *lines]))
    signs = {sign: name for name, benchmark in published.items() for sign in benchmark.signs}
    other = "shards" if holds_shards(target) else "folder"
    name = next((name for sign, name in signs.items() if (target / sign).exists()), other)
    return DatasetConfig.variants[name](root=str(target), validation_fraction=0.0)
