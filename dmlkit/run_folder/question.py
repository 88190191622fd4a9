"""The question that an evaluation answers: stored metrics may be reused only for the same question."""

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel

from dmlkit.datasets.base import Split
from dmlkit.recipe.file import plain
from dmlkit.recipe.schema import Recipe


class Question(BaseModel, frozen=True, extra="forbid"):
    """Everything that the metrics of an evaluation depend on."""

    weights: str
    """Fingerprint of the model."""
    checkpoint: Literal["last", "best", "untouched"]
    """Name of the checkpoint; ``untouched`` is the backbone before training, without the head."""
    split: Split
    dataset: dict[str, Any]
    """Dataset of the resolved recipe."""
    transform: dict[str, Any] | None
    """Transform of the resolved recipe; null for vectors."""
    metrics: list[Any]
    """Names of metrics, or their options where a name is not enough."""
    ties: Literal["expected", "pessimistic"]
    """How items with the same score are counted."""

    @classmethod
    def of(cls, recipe: Recipe, weights: str, checkpoint: str, split: str, ties: str = "expected") -> "Question":
        """Build the question for weights and a recipe's dataset, transform and metrics."""
        resolved = plain(recipe)
        fields = {name: resolved[name] for name in ("dataset", "transform", "metrics")}
        return cls.model_validate(
            {"weights": weights, "checkpoint": checkpoint, "split": split, "ties": ties, **fields}
        )

    def key(self) -> str:
        """Return a hash of eight characters that identifies the question."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:8]

    def file_name(self, own: "Question") -> str:
        """Return the file name of the report without its suffix; only the run's ``own`` question has no hash in it."""
        name = f"{self.split}-{self.checkpoint}"
        return name if self == own else f"{name}-{self.key()}"
