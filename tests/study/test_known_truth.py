"""A truth that is planted: models that are alike are not told apart, and a harm that is there is found.

Classes are hard or easy, training makes some of them easier by chance, and a share of wrong labels harms each class by
as much as it has of them: what a query shows is mostly what its class does.
"""

import numpy as np
import pytest
import torch

from dmlkit.metrics.statistics import holm, paired_differences
from dmlkit.study.definition.config import Expectation
from dmlkit.study.verdicts import JudgedStatement, VariantResults, judge

CLASSES, QUERIES = 41, 20  # a class
SHUFFLED = 0.1  # of the labels


def model(rng: np.random.Generator, easy: np.ndarray, shuffled: float) -> dict[str, torch.Tensor]:
    """Figures of queries (Q,) in three metrics, of a training with a share of wrong labels."""
    harm = 1 - rng.binomial(QUERIES, shuffled, CLASSES) / QUERIES
    of_class = np.repeat((easy + rng.normal(0, 0.05, CLASSES)) * harm, QUERIES)
    values = np.clip(of_class + rng.normal(0, 0.1, CLASSES * QUERIES), 0, 1)
    hits = {f"recall@{k}": (rng.random(len(values)) < 1 - (1 - values) ** k).astype(float) for k in (1, 2)}
    return {name: torch.from_numpy(column) for name, column in {"map@r": values, **hits}.items()}


@pytest.mark.heavy
def test_compare_tells_models_apart_that_differ_and_no_others():
    rng, classes = np.random.default_rng(0), torch.arange(CLASSES).repeat_interleave(QUERIES)
    alike, harmed, by_queries = list[bool](), list[bool](), list[bool]()
    for repetition in range(60):
        easy = rng.beta(6, 4, CLASSES)
        first, second, worse = (model(rng, easy, share) for share in (0.0, 0.0, SHUFFLED))
        differences = [paired_differences(first, other, classes).values() for other in (second, worse)]
        corrected = [holm([change.p_value for change in changes]) for changes in differences]
        alike.append(min(corrected[0]) >= 0.05)
        harmed.append(corrected[1][0] < 0.05)
        if repetition < 20:
            by_queries.append(paired_differences(first, second, None)["map@r"].p_value >= 0.05)
    assert sum(alike) >= 54  # an error in 20 gives 57 +- 2
    assert sum(harmed) >= 57
    assert sum(by_queries) < 16  # what is avoided: queries as if independent


def study(rng: np.random.Generator, shares: dict[str, float]) -> tuple[JudgedStatement, ...]:
    """The verdicts of a study with 5 seeds: every variant against ``base``, by map@r."""
    easy, variants = rng.beta(6, 4, CLASSES), dict[str, VariantResults]()
    for name, share in shares.items():
        values = [float(model(rng, easy, share)["map@r"].mean()) for _ in range(5)]
        runs = {seed: {"map@r": value} for seed, value in enumerate(values)}
        variants[name] = VariantResults.of(runs, ["map@r"])
    statements = [Expectation(better="base", than=name, metric="map@r") for name in shares if name != "base"]
    return judge(statements, variants, 5, 0)


@pytest.mark.heavy
@pytest.mark.parametrize("alike", [1, 4])
def test_a_study_tells_variants_apart_that_differ_and_no_others(alike: int):
    rng, right, found = np.random.default_rng(1), list[bool](), list[bool]()
    for _ in range(600):
        *same, harmed = study(rng, {"base": 0.0} | {f"alike{i}": 0.0 for i in range(alike)} | {"harmed": SHUFFLED})
        right.append(all(one.corrected_verdict == "not separable at this size" for one in same))
        found.append(harmed.corrected_verdict == harmed.verdict == "holds")
    assert np.mean(right) >= 0.932  # an error in 20, of all verdicts of a study together, gives 0.95 +- 0.009
    assert np.mean(found) >= 0.95
