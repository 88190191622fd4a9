"""What an evaluation asked: stored figures may be used again for the same question only."""

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel

from dmlkit.datasets.base import Split
from dmlkit.recipe.file import plain
from dmlkit.recipe.schema import Recipe


class Question(BaseModel, frozen=True, extra="forbid"):
    """Everything that the figures of an evaluation depend on."""

    weights: str
    """Fingerprint of the model."""
    checkpoint: Literal["last", "best", "untouched"]
    """``untouched`` is no checkpoint: the backbone before training, without the head."""
    split: Split
    dataset: dict[str, Any]
    """As in the recipe, resolved."""
    transform: dict[str, Any] | None
    """As in the recipe, resolved; null for vectors."""
    metrics: list[Any]
    """By name where names say all."""
    ties: Literal["expected", "pessimistic"]
    """How items of the same score count."""

    @classmethod
    def of(cls, recipe: Recipe, weights: str, checkpoint: str, split: str, ties: str = "expected") -> "Question":
        """The question that a recipe's dataset, transform and metrics ask of weights."""
        resolved = plain(recipe)
        fields = {name: resolved[name] for name in ("dataset", "transform", "metrics")}
        return cls.model_validate(
            {"weights": weights, "checkpoint": checkpoint, "split": split, "ties": ties, **fields}
        )

    def key(self) -> str:
        """Eight characters that differ between questions."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:8]

    def file_name(self, own: "Question") -> str:
        """The name of its report, without the suffix; that of the run's ``own`` question is the plain one."""
        name = f"{self.split}-{self.checkpoint}"
        return name if self == own else f"{name}-{self.key()}"
