"""Intervals over seeds and classes: against the bootstrap that draws both, plain loops and planted truths."""

import statistics

import numpy as np
import pytest
from scipy import stats

from dmlkit.run_folder.documents import ClassMetrics
from dmlkit.study.definition.config import Expectation
from dmlkit.study.tables import verdict_text
from dmlkit.study.two_way import PairedClasses
from dmlkit.study.verdicts import (
    PairedFigures,
    VariantResults,
    compare_at_looks,
    differences,
    is_decided,
    judge,
    least_p_values,
)

Array = np.ndarray


def drawn(rng: np.random.Generator, changes: Array, queries: Array, draws: int) -> Array:
    """Means of the pigeonhole bootstrap: seeds and classes are drawn independently."""
    seeds, classes = changes.shape
    chosen = rng.multinomial(seeds, np.full(seeds, 1 / seeds), draws)
    weights = rng.multinomial(classes, np.full(classes, 1 / classes), draws) * queries
    return (chosen @ changes * weights).sum(1) / seeds / weights.sum(1)


def test_the_variances_are_those_of_the_bootstrap_that_draws_seeds_and_classes():
    """Owen's formula for its variance, with the shares that a draw with replacement leaves."""
    rng = np.random.default_rng(0)
    for seeds, classes in ((5, 41), (12, 20)):
        queries = rng.integers(15, 25, classes).astype(float)
        changes = rng.normal(0, 0.02, (seeds, 1)) + rng.normal(0, 0.05, classes) + rng.normal(0, 0.05, (seeds, classes))
        by_seed, by_class, rest = PairedClasses(changes, queries).variances()
        left = (seeds - 1) / seeds, (classes - 1) / classes
        expected = by_seed * left[0] + by_class * left[1] + rest * left[0] * left[1]
        assert drawn(rng, changes, queries, 20_000).var() == pytest.approx(expected, rel=0.06)


def test_the_variances_are_mean_squares_of_loops_for_classes_of_equal_size():
    changes = np.random.default_rng(1).normal(0, 1, (4, 7))
    rows, columns, mean = changes.mean(1), changes.mean(0), changes.mean()
    rest = sum((changes[s, c] - rows[s] - columns[c] + mean) ** 2 for s in range(4) for c in range(7)) / (3 * 6) / 28
    found = PairedClasses(changes, np.full(7, 20.0))
    expected = statistics.variance(rows) / 4, statistics.variance(columns) / 7, rest
    assert found.variances() == pytest.approx(expected)
    assert found.compare().difference == pytest.approx(mean)


@pytest.mark.parametrize("shape", [(4, 1), (1, 30)], ids=["seeds", "classes"])
def test_differences_of_seeds_or_of_classes_alone_are_compared_by_students_test_over_them(shape: tuple[int, int]):
    changes = np.random.default_rng(2).normal(0.01, 0.02, shape)
    found = PairedClasses(np.broadcast_to(changes, (4, 30)), np.ones(30)).compare()
    expected = stats.ttest_1samp(changes.ravel(), 0)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high, found.p_value) == pytest.approx((interval.low, interval.high, expected.pvalue))


# deviations of seeds, of classes and of both together; those of classes may be exponential: a few differ much
GROUNDS = {
    "classes": (0.003, 0.03, 0.03, False),
    "seeds": (0.02, 0.0, 0.02, False),
    "neither": (0.0, 0.0, 0.05, False),
    "both": (0.005, 0.02, 0.05, False),
    "skewed classes": (0.003, 0.03, 0.03, True),
}


def planted(rng: np.random.Generator, seeds: int, classes: int, ground: str) -> PairedClasses:
    """Differences whose mean over all seeds and classes is 0."""
    of_seed, of_class, of_both, is_skewed = GROUNDS[ground]
    by_class = rng.exponential(of_class, classes) - of_class if is_skewed else rng.normal(0, of_class, classes)
    rest = rng.normal(0, of_both, (seeds, classes))
    changes = rng.normal(0, of_seed, (seeds, 1)) + by_class + rest
    return PairedClasses(changes, rng.integers(10, 30, classes).astype(float))


@pytest.mark.slow
@pytest.mark.parametrize("ground", GROUNDS)
def test_the_interval_holds_the_truth_in_93_to_97_percent_for_20_to_100_classes(ground: str):
    """1 000 studies each: 0.95 +- 0.0069 by chance, so two deviations of chance are allowed beyond 93 and 97 %."""
    rng, naive = np.random.default_rng(3), list[float]()
    for seeds, classes in ((5, 20), (12, 100)):
        factor = stats.t.ppf(0.975, seeds - 1) / seeds**0.5
        holds, plain = list[bool](), list[bool]()
        for _ in range(1000):
            one = planted(rng, seeds, classes, ground)
            found = one.compare()
            holds.append(found.low <= 0 <= found.high)
            figures = one.changes @ (one.queries / one.queries.sum())
            plain.append(abs(figures.mean()) <= factor * figures.std(ddof=1))
        assert 0.93 - 0.014 <= np.mean(holds) <= 0.97 + 0.014, (seeds, classes)
        naive.append(float(np.mean(plain)))
    if "classes" in ground:
        assert max(naive) < 0.9  # what it is there for: intervals over seeds alone do not cover other classes


@pytest.mark.slow
def test_looks_as_seeds_are_added_call_at_most_5_percent_different():
    """Classes stay the same at all looks, which leaves fewer errors than Pocock's bound allows."""
    rng = np.random.default_rng(5)
    for ground in ("classes", "both", "seeds"):
        called = 0
        for _ in range(200):
            whole = planted(rng, 12, 41, ground)
            share = whole.queries / whole.queries.sum()
            method = (whole.changes @ share).tolist()
            parts = {n: PairedClasses(whole.changes[:n], whole.queries) for n in range(5, 13)}
            called += any(is_decided(PairedFigures([0.0] * n, method[:n], parts[n]), 5, 12) for n in parts)
        assert called <= 200 * 0.05 + 2 * (200 * 0.05 * 0.95) ** 0.5, ground


@pytest.mark.slow
def test_skewed_differences_of_seeds_are_called_more_often_than_5_percent():
    """A limit that docs/studies.md states: Student's test needs more seeds if a difference is far to one side."""
    rng = np.random.default_rng(6)
    rates: dict[str, float] = {}
    for name, draw in {"skewed": rng.exponential, "symmetric": rng.laplace}.items():
        called = 0
        for _ in range(400):
            method = draw(size=12) - (1 if name == "skewed" else 0)
            called += any(is_decided(PairedFigures([0.0] * n, method[:n].tolist()), 5, 12) for n in range(5, 13))
        rates[name] = called / 400
    assert rates["symmetric"] <= 0.05 + 2 * (0.05 * 0.95 / 400) ** 0.5
    assert 0.09 < rates["skewed"] < 0.17


def test_the_bound_of_looks_widens_the_interval_over_seeds_and_classes():
    one = planted(np.random.default_rng(7), 6, 41, "both")
    method = (one.changes @ (one.queries / one.queries.sum())).tolist()
    comparison = compare_at_looks(PairedFigures([0.0] * 6, method, one), 5, 10)
    bound = np.quantile(least_p_values(5, 10), 0.05)
    variance, freedom = one.spread()
    margin = stats.t.ppf(1 - bound / 2, freedom) * variance**0.5
    ends = np.mean(method) - margin, np.mean(method) + margin
    assert (comparison.low, comparison.high) == pytest.approx(ends, abs=1e-4)
    assert comparison.p_value > one.compare().p_value


CLASSES = 12


def variant(changes: Array, queries: Array) -> VariantResults:
    names = tuple(f"class {i}" for i in range(CLASSES))
    runs = {seed: {"map@r": float(np.average(row, weights=queries))} for seed, row in enumerate(changes)}
    counts = tuple(int(query) for query in queries)
    classes = {
        seed: ClassMetrics(names=names, queries=counts, metrics={"map@r": tuple(row.tolist())})
        for seed, row in enumerate(changes)
    }
    return VariantResults.of(runs, ["map@r"], classes=classes)


def variants_that_differ_on_classes() -> dict[str, VariantResults]:
    """A gain that every seed has in the same size, and only half of the classes."""
    rng = np.random.default_rng(8)
    queries = rng.integers(10, 30, CLASSES)
    base = rng.uniform(0.3, 0.7, CLASSES) + rng.normal(0, 0.002, (5, CLASSES))
    gain = np.where(np.arange(CLASSES) % 2, 0.06, -0.05)
    return {"base": variant(base, queries), "method": variant(base + gain + rng.normal(0, 1e-3, base.shape), queries)}


STATEMENT = Expectation(better="method", than="base", metric="map@r")


def test_what_holds_over_seeds_alone_may_not_be_separable_over_classes():
    variants = variants_that_differ_on_classes()
    (judged,) = judge([STATEMENT], variants, 5, 0)
    over_both = {name: one.model_copy(update={"classes": None}) for name, one in variants.items()}
    (alone,) = judge([STATEMENT], over_both, 5, 0)
    assert alone.verdict in ("holds", "does not hold") and alone.classes is None
    assert (judged.verdict, judged.classes) == ("not separable at this size", CLASSES)
    assert judged.difference == pytest.approx(alone.difference)
    assert judged.runs_to_separate is None
    assert verdict_text(judged, variants).endswith(f"no number of seeds would decide with {CLASSES} test classes")
    changes = differences(variants["method"], variants["base"], ["map@r"])  # from the reference, as the statements are
    assert changes is not None and (changes["map@r"].low, changes["map@r"].p_value) == (judged.low, judged.p_value)


@pytest.mark.parametrize("change", ["names", "queries", "seeds", "few"])
def test_without_the_figures_of_both_variants_on_equal_classes_it_is_over_seeds_alone(change: str):
    variants = variants_that_differ_on_classes()
    classes = variants["base"].classes
    assert classes is not None
    other = dict(classes)
    for seed, one in classes.items():
        changed = {
            "names": {"names": (*one.names[1:], "another")} if seed == 3 else {},  # of one run alone
            "queries": {"queries": (*one.queries[1:], 1)},
            "few": {"names": one.names[:4], "queries": one.queries[:4], "metrics": {"map@r": one.metrics["map@r"][:4]}},
        }
        other[seed] = one.model_copy(update=changed.get(change, {}))
    if change == "seeds":
        del other[0]
    method = other if change == "few" else variants["method"].classes
    assert PairedClasses.of(other, method, "map@r", list(range(5))) is None


def test_the_number_of_seeds_that_would_decide_does():
    """Differences of the seeds alone: their own number of seeds, by the interval of as many."""
    rng = np.random.default_rng(9)
    changes = 0.01 + rng.normal(0, 0.02, (6, 1)) + rng.normal(0, 1e-4, (6, 40))
    needed = PairedClasses(changes, np.ones(40)).runs_to_separate()
    by_seed = changes.mean(1)
    size, spread = abs(by_seed.mean()), by_seed.std(ddof=1)
    enough = [n for n in range(2, 1000) if stats.t.ppf(0.975, n - 1) * spread / n**0.5 < size]
    assert needed is not None and abs(needed - enough[0]) <= 1


def test_metrics_of_classes_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="one count and one value"):
        ClassMetrics(names=("a", "b"), queries=(3, 4), metrics={"map@r": (0.1,)})
