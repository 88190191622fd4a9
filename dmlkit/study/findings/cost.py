"""What a study took."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from dmlkit.run_folder.documents import Environment, Summary
from dmlkit.run_folder.folder import RunFolder


class Cost(BaseModel, frozen=True, extra="forbid"):
    """What a study took."""

    models: int
    """That were trained."""
    seconds: float
    """Of training and validation, over all models."""
    on: tuple[str, ...]
    """What computed, with its versions."""

    @classmethod
    def of(cls, runs: Sequence[Path]) -> "Cost":
        """That of finished runs."""
        folders = [RunFolder(path) for path in runs]
        return cls(
            models=len(folders),
            seconds=round(sum(Summary.read(folder.summary_path).seconds for folder in folders), 1),
            on=tuple(sorted({Environment.read(folder.environment_path).device for folder in folders})),
        )
