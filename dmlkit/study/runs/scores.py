"""The figures of a run by one name each, and the score that chooses between runs."""

from pathlib import Path
from statistics import fmean

from dmlkit.errors import UserError
from dmlkit.run_folder.documents import Metrics, Summary
from dmlkit.study.protocol import Figures


def flat_figures(figures: Figures) -> Metrics:
    """Figures by one name: ``map@r`` of a run, ``separated map@r`` of a Reality Check.

    Example:
        >>> flat_figures({"test": {"map@r": 0.5}}), flat_figures({"separated": {"map@r": 0.4}})
        ({'map@r': 0.5}, {'separated map@r': 0.4})
    """
    return {
        name if kind == "test" else f"{kind} {name}": value
        for kind, metrics in figures.items()
        for name, value in metrics.items()
    }


def validation_score(folder: Path) -> float:
    """What chose the checkpoint of a run; of a Reality Check the mean of its 4 models.

    Raises:
        UserError: a summary tells of no best checkpoint.
    """
    return fmean(_best_score(path) for path in summaries(folder))


def summaries(folder: Path) -> list[Path]:
    """The summaries of all finished trainings in a folder."""
    return sorted(folder.rglob("summary.json"))


def _best_score(path: Path) -> float:
    score = Summary.read(path).best_score
    if score is None:  # a study has validation classes
        raise UserError(f"{path}: tells of no best checkpoint; remove it, and the run is scored again")
    return score
