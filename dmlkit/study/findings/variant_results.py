"""What the runs of one variant come to, as documents within ``results.json``."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from pydantic import BaseModel

from dmlkit.evaluation.statistics import paired_runs
from dmlkit.run_folder.documents import Metrics
from dmlkit.study.definition.config import Candidate
from dmlkit.study.definition.edge import beyond_edge, grid_of, values_beside
from dmlkit.study.findings.looks import paired_figures
from dmlkit.study.protocol import MeanInterval

End = Literal["lowest", "highest", "only", "only, lowest", "only, highest"]
"""Of the values tried with the chosen ones of the other keys. The only one of these may be the lowest or highest of all
values of the key."""


class Difference(BaseModel, frozen=True, extra="forbid"):
    """How runs of a variant differ from those of another with the same seeds, by Student's paired t-test."""

    difference: float
    """Mean of this variant's minus the other's."""
    low: float | None
    """Of the 95 % interval; null where a single pair has none."""
    high: float | None
    """As ``low``."""
    p_value: float
    """How probable a difference this far from 0 is where there is none."""


class Tuned(BaseModel, frozen=True, extra="forbid"):
    """What a variant was tuned by."""

    chosen: str
    """The label of the choice."""
    validation: dict[str, float]
    """Scores on validation classes, by label; the mean over the seeds that choose."""
    edge: dict[str, End] = {}
    """Keys of which the chosen value has no tried one beyond it: a better one may lie there."""


class VariantResults(BaseModel, frozen=True, extra="forbid"):
    """The figures of a variant."""

    tuned: Tuned | None
    """Null where there was nothing to choose."""
    runs: dict[int, Metrics]
    """Figures on test classes, by seed, of the checkpoint that was best on validation classes."""
    last: dict[int, Metrics] = {}
    """Those after all epochs; without what the best checkpoints alone were scored for."""
    untrained: Metrics | None = None
    """Those of the variant's backbone before training, without its head; null where they are not known."""
    summary: dict[str, MeanInterval]
    """Over seeds, by metric, of ``runs``."""
    difference: dict[str, Difference] | None
    """From the reference, by metric; null for the reference itself, and where they share no seed."""

    def is_below_untrained(self, metric: str) -> bool:
        """Whether training did not get to what its backbone could do before; not where that is unknown."""
        floor = None if self.untrained is None else self.untrained.get(metric)
        return floor is not None and fmean(run[metric] for run in self.runs.values()) < floor


def over_seeds(
    runs: Mapping[int, Metrics], reference: Mapping[int, Metrics] | None, metrics: Sequence[str]
) -> tuple[dict[str, MeanInterval], dict[str, Difference] | None]:
    """By metric, a variant's mean over seeds, and its difference to another reference of which it shares seeds.

    Args:
        runs: figures by seed.
        reference: likewise, of the variant that the others are compared with; None for itself.
        metrics: which.
    """
    summary = {name: MeanInterval.of([run[name] for run in runs.values()]) for name in metrics}
    if reference is None:
        return summary, None
    pairs = {name: paired_figures(reference, runs, name) for name in metrics}
    changes = {name: paired_runs(*figures).as_dict() for name, figures in pairs.items() if figures[0]}
    return summary, {name: Difference.model_validate(one) for name, one in changes.items()} or None


def edges_of(candidates: Sequence[Candidate], chosen: Candidate) -> dict[str, End]:
    """Return the tuned keys of which the chosen value is at an edge: in one direction, or in both where it is the only
    one, nothing was tried with the chosen values of the other keys.

    Only numbers have an order, and nothing lies beyond 1 where the key takes whole numbers alone.

    Args:
        candidates: of a variant, all that were tried.
        chosen: one of them.
    """
    edges: dict[str, End] = {}
    steps = beyond_edge(candidates, candidates, chosen)
    for key, value in chosen.values.items():
        known = grid_of([one.values[key] for one in candidates])
        is_alone = len(grid_of(values_beside(candidates, chosen, key))) == 1
        for step in (one[key] for one in steps if one[key] != value):
            if not is_alone:
                edges[key] = "lowest" if step < value else "highest"
            elif step not in known:
                edges[key] = "only, lowest" if step < value else "only, highest"
        if known and is_alone:
            edges.setdefault(key, "only")
    return edges
