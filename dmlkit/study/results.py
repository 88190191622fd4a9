"""What the runs of a study say: intervals, paired differences and verdicts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal

from dmlkit.evaluation.significance import Comparison, paired_runs, runs_to_separate, t_interval
from dmlkit.study.config import Candidate, Study, Variant

Verdict = Literal["holds", "does not hold", "not separable at this size"]


@dataclass(frozen=True)
class Choice:
    """A variant's candidate that was chosen on validation classes, and its runs.

    Args:
        candidate: the one chosen.
        scores: on validation classes, one a candidate of the variant.
        figures: on test classes, by seed.
    """

    candidate: Candidate
    scores: tuple[float, ...]
    figures: dict[int, dict[str, float]]

    def values(self, metric: str) -> list[float]:
        """One figure a seed."""
        return [figures[metric] for figures in self.figures.values()]


def summarize_study(study: Study, choices: Mapping[str, Choice]) -> dict[str, Any]:
    """Everything that a report of a study tells, as plain data; an interval that does not exist is null.

    Means have a 95 % t-interval over seeds. Differences are paired: of runs with the same seed, with Student's paired
    t-test. A statement of the claim gets its verdict from that interval, see `verdict`.
    """
    config = study.config
    return {
        "claim": config.claim,
        "paper": config.paper,
        "table": config.table,
        "protocol": config.protocol,
        "seeds": list(config.seeds),
        "metrics": list(config.reported()),
        "reference": study.reference,
        "axis": asdict(study.axis) if study.axis else None,
        "verdicts": [
            {**expectation.model_dump(), **_judged(choices, expectation.better, expectation.than, expectation.metric)}
            for expectation in config.expect
        ],
        "variants": {variant.name: _variant_results(variant, study, choices) for variant in study.variants},
    }


def verdict(comparison: Comparison) -> Verdict:
    """Whether "better than" holds: the 95 % interval of the paired difference lies above 0, below 0, or across it.

    Example:
        >>> verdict(paired_runs([0.5, 0.6, 0.7], [0.53, 0.64, 0.75]))
        'holds'
        >>> verdict(paired_runs([0.5], [0.9]))
        'not separable at this size'
    """
    if comparison.low > 0:
        return "holds"
    return "does not hold" if comparison.high < 0 else "not separable at this size"


def _judged(choices: Mapping[str, Choice], better: str, than: str, metric: str) -> dict[str, Any]:
    base, method = choices[than].values(metric), choices[better].values(metric)
    comparison = paired_runs(base, method)
    return {
        **_plain(comparison.as_dict()),
        "verdict": verdict(comparison),
        "runs_to_separate": runs_to_separate(base, method),
    }


def _variant_results(variant: Variant, study: Study, choices: Mapping[str, Choice]) -> dict[str, Any]:
    choice, metrics = choices[variant.name], study.config.reported()
    reference = choices[study.reference]
    labels = [candidate.label for candidate in variant.candidates]
    return {
        "tuned": {"chosen": choice.candidate.label, "validation": dict(zip(labels, choice.scores, strict=True))}
        if len(labels) > 1
        else None,
        "runs": {str(seed): {name: figures[name] for name in metrics} for seed, figures in choice.figures.items()},
        "summary": {name: _plain(asdict(t_interval(choice.values(name)))) for name in metrics},
        "difference": None
        if variant.name == study.reference
        else {name: _plain(paired_runs(reference.values(name), choice.values(name)).as_dict()) for name in metrics},
    }


def _plain(figures: dict[str, float]) -> dict[str, float | None]:
    """Figures that JSON can hold: an endless interval is none."""
    return {name: value if isfinite(value) else None for name, value in figures.items()}
