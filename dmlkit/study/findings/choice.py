"""What a variant chose on validation classes, and the figures of its runs."""

from dataclasses import dataclass

from dmlkit.run_folder.documents import Metrics
from dmlkit.study.definition.config import Candidate


@dataclass(frozen=True)
class Choice:
    """A variant's candidate that was chosen on validation classes, and its runs.

    Args:
        candidate: the one chosen.
        scores: on validation classes, the mean over the seeds that choose, one a candidate of the variant.
        figures: on test classes, by seed.
    """

    candidate: Candidate
    scores: tuple[float, ...]
    figures: dict[int, Metrics]

    def values(self, metric: str) -> list[float]:
        """One figure a seed."""
        return [figures[metric] for figures in self.figures.values()]
