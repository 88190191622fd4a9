"""What a folder records when a study or a protocol begins in it, and who may go on there."""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from lightning_fabric import Fabric
from pydantic import BaseModel, ValidationError

from dmlkit.errors import UserError
from dmlkit.files.atomic import is_partial
from dmlkit.files.document import Document, differences
from dmlkit.files.lock import LOCK, sole_writer
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder

FAILURES = "failures.json"
# keys that no figure depends on; nor on the paper of a statement
REWORDED = ("claim", "paper", "table", "negligible")


class RecordedStudy(BaseModel, frozen=True, extra="forbid"):
    """Everything that a study's figures depend on, and what it claims."""

    claim: str
    paper: str | None
    table: str | None
    protocol: str
    metrics: tuple[str, ...]
    """Names of the figures."""
    seeds: tuple[int, ...]
    tune_seeds: tuple[int, ...] = ()
    """That choose among tuned values; the first of ``seeds`` where there are none."""
    extend: int = 0
    """How many values a variant may add at the edge of its grid."""
    more_seeds: int = 0
    """How many seeds may be added."""
    negligible: float | None = None
    """A difference that does not matter."""
    rotate_folds: bool = False
    """Whether each seed validates on the next fold."""
    reference: str
    """The variant that the others are compared with."""
    expect: tuple[dict[str, str], ...]
    """The statements of the claim."""
    variants: dict[str, dict[str, dict[str, Any]]]
    """Recipes without their seed, by variant and choice."""


class StudyRecord(Document, frozen=True):
    """``study.json``: what the runs of a folder depend on."""

    kind: ClassVar[str] = "record of a study"
    version: ClassVar[int] = 2
    older: ClassVar[dict[int, tuple[str, ...]]] = {1: ()}  # tuned with the first seed, within its grid

    study: RecordedStudy
    command: str
    """That repeats the study."""

    @classmethod
    def of(cls, folder: Path) -> "StudyRecord":
        """That of a study's folder.

        Raises:
            UserError: there is none.
        """
        path = folder / "study.json"
        if not path.exists():
            raise UserError(
                f"{folder}: no study here (study.json is missing); expected a folder that dmlkit study wrote"
            )
        return cls.read(path)


class StudyFailures(Document, frozen=True):
    """``failures.json``: the runs of a study that failed in its last session."""

    kind: ClassVar[str] = "list of failed runs"

    failed: dict[str, str]
    """Reasons by the names of runs."""

    def lines(self) -> list[str]:
        """One line for each reason, with the first runs that have it and how many more do: a wrong path fails them all.

        Example:
            >>> StudyFailures(failed={"a/seed-0": "no disk", "a/seed-1": "no disk", "b/seed-0": "no loss"}).lines()
            ['a/seed-0, a/seed-1: no disk', 'b/seed-0: no loss']
            >>> StudyFailures(failed={f"a/seed-{seed}": "no disk" for seed in range(70)}).lines()
            ['a/seed-0, a/seed-1, a/seed-2 and 67 more: no disk']
        """
        names: dict[str, list[str]] = {}
        for name, reason in self.failed.items():
            names.setdefault(reason, []).append(name)
        return [f"{_first(runs)}: {reason}" for reason, runs in names.items()]


def _first(names: list[str]) -> str:
    shown = names if len(names) <= 4 else names[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 4 else "")


class ProtocolRecord(Document, frozen=True):
    """``protocol.json``: whose runs a folder holds."""

    kind: ClassVar[str] = "record of a protocol"

    protocol: str
    """Its name."""


@contextmanager
def open_study(record: Mapping[str, Any], folder: Path, fabric: Fabric, command: str) -> Generator[None]:
    """Begin a study in a folder, or find it there again; its seeds may have grown and its claim been reworded. In the
    block no other process works on it.

    Args:
        record: see `Study.record`.
        folder: of the study; need not exist yet.
        fabric: the ranks.
        command: that repeats the study.

    Raises:
        UserError: the folder holds something else, a study with other runs, or another process works on it.
    """
    path = folder / "study.json"
    begun = StudyRecord(study=RecordedStudy.model_validate(record), command=command)
    if path.exists():
        stored, new = (one.study.model_dump(mode="json") for one in (StudyRecord.read(path), begun))
        for statement in (*stored["expect"], *new["expect"]):
            statement.pop("paper", None)
        same = {name: stored[name] for name in REWORDED} | {"seeds": new["seeds"][: len(stored["seeds"])]}
        same["extend"] = min(new["extend"], stored["extend"])  # it may grow: what was tried stays tried
        for recipes in stored["variants"].values():
            recipes.update({label: with_new_defaults(recipe) for label, recipe in recipes.items()})
        changes = list(differences("", stored, {**new, **same}))
        if changes:
            raise UserError(
                f"{folder}: the study has changed since it began ({'; '.join(changes)}); undo that, or start anew "
                "with another --output"
            )
    elif is_taken(folder):
        raise UserError(f"{folder}: exists and is not a study; choose another --output")
    with _held(begun, path, fabric):
        yield


def with_new_defaults(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without its seed, as an older dmlkit recorded it, with the defaults of keys that are new since."""
    try:
        return Recipe.model_validate_json(json.dumps(recipe)).model_dump(mode="json", exclude={"seed"})
    except ValidationError:  # a key has gone: the difference tells which
        return recipe


@contextmanager
def open_protocol(name: str, folder: Path, fabric: Fabric, runs: str) -> Generator[None]:
    """Begin a protocol in a folder, or find it there again. In the block no other process works on it.

    Args:
        name: of the protocol.
        folder: of its runs; need not exist yet.
        fabric: the ranks.
        runs: where they lie in the folder, as a pattern: dmlkit 0.1.0 recorded no protocol beside them.

    Raises:
        UserError: the folder holds something else, another protocol, or another process works on it.
    """
    path = folder / "protocol.json"
    if path.exists():
        found = ProtocolRecord.read(path).protocol
        if found != name:
            raise UserError(f"{folder}: holds runs of the protocol {found}, not of {name}; choose another --output")
    elif is_taken(folder) and not any(RunFolder(run).holds_run() for run in folder.glob(runs)):
        raise UserError(f"{folder}: exists and holds no runs of the protocol {name}; choose another --output")
    with _held(ProtocolRecord(protocol=name), path, fabric):
        yield


def is_taken(folder: Path) -> bool:
    """Whether something is here but what is left of a writing that was cut off."""
    if not folder.is_dir():
        return folder.exists()
    return any(entry.name != LOCK and not is_partial(entry) for entry in folder.iterdir())


@contextmanager
def _held(record: Document, path: Path, fabric: Fabric) -> Generator[None]:
    fabric.barrier()  # all ranks have looked before the first one writes
    with sole_writer(path.parent, what=f"a {path.stem}") if fabric.is_global_zero else nullcontext():
        if fabric.is_global_zero:
            record.write(path)
        fabric.barrier()
        yield
