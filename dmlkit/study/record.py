"""Records that a study writes into its folder at its start, and checks before it is continued there."""

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
)

from dmlkit.errors import UserError, some_of
from dmlkit.files.document import Document, differences
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import check_folder
from dmlkit.files.source import STUDY_MARK

if TYPE_CHECKING:
    from dmlkit.distributed.launch import Ranks

ProtocolName = Literal["official", "reality_check"]
FAILURES = "failures.json"
# keys on which no figure depends; the paper of a statement is another one
REWORDED = ("claim", "paper", "table", "negligible")


class StudySettings(BaseModel, frozen=True, extra="forbid"):
    """The claim of a study and its settings, which its file, its record and its results have in common."""

    claim: str
    """The claim in one line; the first key of the file."""
    paper: str | None = None
    """Paper that makes the claim."""
    table: str | None = None
    """Table of the paper that supports the claim."""
    protocol: ProtocolName = "official"
    """Protocol that splits and scores a run."""
    seeds: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    """Seeds; each variant has one run per seed. More seeds may be added later."""
    metrics: tuple[str, ...]
    """Figures to report."""
    reference: str
    """Variant with which the others are compared."""
    tune_seeds: tuple[NonNegativeInt, ...] = ()
    """Seeds that choose among the values of ``tune`` by their mean score. Default: the first of ``seeds``."""
    more_seeds: Annotated[int, Field(ge=0, le=50)] = 0
    """Number of seeds that may be added to variants of statements that are not separable yet."""
    negligible: PositiveFloat | None = None
    """Largest difference that does not matter; a statement is also decided if its interval lies within it."""
    rotate_folds: bool = False
    """Validate seed s on fold s mod 4, so that seeds validate on different classes; needs split reality_check."""

    @property
    def models_per_run(self) -> int:
        """Number of models per run; the Reality Check trains one model per fold."""
        if self.protocol != "reality_check":
            return 1
        from dmlkit.datasets.base import FOLDS  # imports torch

        return FOLDS

    def first_seeds(self, *, is_tuned: bool) -> tuple[int, ...]:
        """Return the seeds that train every candidate: the tuning seeds, or all seeds if nothing is tuned."""
        return (self.tune_seeds or self.seeds[:1]) if is_tuned else self.seeds


class StudyRecord(StudySettings, Document, frozen=True):
    """``study.json``: the claim of a study, and everything on which its figures depend."""

    kind: ClassVar[str] = "record of a study"

    command: str  # repeats the study
    extend: int = 0  # number of values that a variant may add at the edge of its grid
    expect: tuple[dict[str, str], ...]  # statements of the claim
    variants: dict[str, dict[str, dict[str, Any]]]
    """Recipes without their seed, by variant and choice. A file has the first one whole, and the differences of each
    from it: 330 recipes take 140 kB instead of 1.1 MB."""

    @field_serializer("variants")
    def shorten(self, variants: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
        """Return the first recipe, and the differences of all recipes from it."""
        base = next((recipe for recipes in variants.values() for recipe in recipes.values()), {})
        changed = {
            variant: {label: dict(_changes(base, recipe)) for label, recipe in recipes.items()}
            for variant, recipes in variants.items()
        }
        return {"base": base, "changed": changed}

    @field_validator("variants", mode="before")
    @classmethod
    def restore(cls, variants: Any, info: ValidationInfo) -> Any:
        """Return the whole recipes of a file."""
        if info.mode != "json" or not isinstance(variants, dict) or variants.keys() != {"base", "changed"}:
            return variants
        return {
            variant: {label: _changed(variants["base"], changes) for label, changes in recipes.items()}
            for variant, recipes in variants["changed"].items()
        }


class StudyFailures(Document, frozen=True):
    """``failures.json``: the runs of a study that failed in the last session."""

    kind: ClassVar[str] = "list of failed runs"

    failed: dict[str, str]  # reasons by name of the run

    def lines(self) -> list[str]:
        """Return one line per reason with the first runs that it concerns, since a wrong path fails all runs.

        Example:
            >>> StudyFailures(failed={"a/seed-0": "no disk", "a/seed-1": "no disk", "b/seed-0": "no loss"}).lines()
            ['a/seed-0, a/seed-1: no disk', 'b/seed-0: no loss']
            >>> StudyFailures(failed={f"a/seed-{seed}": "no disk" for seed in range(70)}).lines()
            ['a/seed-0, a/seed-1, a/seed-2, a/seed-3, a/seed-4 and 65 more: no disk']
        """
        names: dict[str, list[str]] = {}
        for name, reason in self.failed.items():
            names.setdefault(reason, []).append(name)
        return [f"{some_of(runs)}: {reason}" for reason, runs in names.items()]


def _changes(base: Any, recipe: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full keys at which a recipe differs from another, with its values.

    Example:
        >>> base = {"seed": 0, "loss": {"name": "triplet", "margin": 0.2}}
        >>> dict(_changes(base, {"seed": 0, "loss": {"name": "triplet", "margin": 0.1}}))
        {'loss.margin': 0.1}
        >>> _changed(base, {"loss.margin": 0.1})
        {'seed': 0, 'loss': {'name': 'triplet', 'margin': 0.1}}
    """
    have_same_keys = isinstance(base, dict) and isinstance(recipe, dict) and base.keys() == recipe.keys()
    if have_same_keys and "." not in "".join(base):
        for name, value in recipe.items():
            yield from _changes(base[name], value, f"{key}.{name}" if key else name)
    elif base != recipe:
        yield key, recipe


def _changed(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe, given another and the keys at which it differs; see `_changes`."""
    recipe = deepcopy(base)
    for key, value in changes.items():
        *path, name = key.split(".")
        reduce(getitem, path, recipe)[name] = value
    return recipe


def _fixed(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return what may not change of a recipe; images that cannot be read may be skipped from now on, as in a run.

    A key that is newer than the study has its default.
    """
    from dmlkit.recipe.file import plain
    from dmlkit.recipe.schema import Recipe

    with suppress(ValidationError):
        recipe = plain(Recipe.model_validate_json(json.dumps(recipe), context={"is_trained": True}))
    return {**recipe, "dataset": {**recipe["dataset"], "on_bad_image": None}}


@contextmanager
def open_study(started: StudyRecord, folder: Path, ranks: "Ranks") -> Generator[None]:
    """Start or continue a study in a folder, and lock the folder during the block.

    A study that is continued may have more seeds, more values to tune and another wording of its claim. One that ended
    before its first run, e.g. because its images were not found, may be any other.
    """
    path = folder / STUDY_MARK
    if path.exists() and any((folder / name).exists() for name in ("runs", "results.json")):
        studies = StudyRecord.read(path), started
        stored, new = (study.model_dump(mode="json", exclude={"variants", "command"}) for study in studies)
        for statement in (*stored["expect"], *new["expect"]):
            statement.pop("paper", None)
        same = {name: stored[name] for name in REWORDED} | {"seeds": new["seeds"][: len(stored["seeds"])]}
        same["extend"] = min(new["extend"], stored["extend"])  # it may grow: the values tried before stay
        changes: list[str] = []
        for variant, recipes in studies[0].variants.items():  # more variants and more values to tune are no change
            tried = started.variants.get(variant, {})
            if lost := [label or "its recipe" for label in recipes if label not in tried]:
                changes.append(f"variants.{variant}: no longer tries {some_of(lost)}")
            for label in (label for label in recipes if label in tried):
                place = f"variants.{variant}.{label}".rstrip(".")
                changes += differences(place, *(_fixed(of_label[label]) for of_label in (recipes, tried)))
        changes += differences("", stored, {**new, **same})
        if changes:
            raise UserError(
                f"{folder}: the study has changed since it started ({'; '.join(changes)}); undo the change, or choose "
                "another --output"
            )
    else:
        check_folder(folder, "a study", "runs", STUDY_MARK)
    ranks.barrier()  # all ranks have checked before the first one writes
    with sole_writer(folder, what="a study") if ranks.is_global_zero else nullcontext():
        if ranks.is_global_zero:
            started.write(path)
        ranks.barrier()
        yield
