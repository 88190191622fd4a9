"""Whether a study's results say what follows from the figures of its runs."""

from collections.abc import Mapping
from math import isclose
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dmlkit.errors import UserError
from dmlkit.study.definition.config import Expectation
from dmlkit.study.findings.results import StudyResults
from dmlkit.study.findings.variant_results import Difference, over_seeds
from dmlkit.study.findings.verdicts import judge

ROUNDING = 1e-6  # of figures derived again, perhaps by another SciPy
STATED = set(Expectation.model_fields)  # of a judged statement, what the study's file says


def check_derived(results: StudyResults, path: Path) -> None:
    """Make sure that means, differences and verdicts are those of the runs' figures, to `ROUNDING`.

    Args:
        results: as read, whole.
        path: of the file, for the error.

    Raises:
        UserError: they are not: somebody has edited the file.
    """
    reference = results.variants.get(results.reference)
    for name, variant in results.variants.items():
        others = None if name == results.reference or reference is None else reference.runs
        summary, difference = over_seeds(variant.runs, others, results.metrics)
        if not _is_close(_plain(variant.summary), _plain(summary)):
            raise _edited(path, f"variants.{name}.summary", results)
        if not _is_close(_plain(variant.difference), _plain(difference)):
            raise _edited(path, f"variants.{name}.difference", results)
    expectations = [Expectation.model_validate(one.model_dump(include=STATED)) for one in results.verdicts]
    derived_verdicts = judge(expectations, results.variants, len(results.seeds), results.more_seeds, results.negligible)
    if len(derived_verdicts) < len(expectations):
        raise _edited(path, "verdicts", results)
    for stored, derived in zip(results.verdicts, derived_verdicts, strict=True):
        told = stored.model_dump()
        if stored.corrected_p_value is None:  # of dmlkit 0.1.0, which told less, and told no other verdicts
            told = {name: told[name] for name in Difference.model_fields}
        if not _is_close(told, {name: value for name, value in derived.model_dump().items() if name in told}):
            raise _edited(path, f"the verdict on {stored.better!r} and {stored.than!r}", results)


def _edited(path: Path, what: str, results: StudyResults) -> UserError:
    return UserError(
        f"{path}: {what} does not follow from the figures of its runs: the file was edited; the runs are as they were, "
        f"and this writes it again: {results.command}"
    )


def _plain(documents: Mapping[str, BaseModel] | None) -> Any:
    return documents and {name: one.model_dump() for name, one in documents.items()}


def _is_close(stored: Any, derived: Any) -> bool:
    """Whether plain data are the same, numbers to `ROUNDING`: SciPy's quantiles differ in the last digit."""
    if isinstance(stored, dict) and isinstance(derived, dict):
        return stored.keys() == derived.keys() and all(_is_close(stored[key], derived[key]) for key in stored)
    if isinstance(stored, float) and isinstance(derived, float):
        return isclose(stored, derived, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return stored == derived
