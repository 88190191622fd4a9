"""Verdicts: against SciPy, by hand, and against a truth that is planted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from scipy import stats

from dmlkit.study.definition.config import Expectation
from dmlkit.study.definition.file import read_study
from dmlkit.study.tables import verdict_text
from dmlkit.study.verdicts import (
    END_TEXTS,
    End,
    JudgedStatement,
    MeanInterval,
    PairedFigures,
    Tuned,
    VariantResults,
    are_equal,
    by_both_figures,
    compare_at_looks,
    edges_of,
    judge,
)
from tests.study.fakes import write_study


def variant(values: Mapping[int, float] | list[float], **others: Any) -> VariantResults:
    figures = dict(enumerate(values)) if isinstance(values, list) else dict(values)
    return VariantResults.of({seed: {"map@r": value} for seed, value in figures.items()}, ["map@r"], **others)


def statement(better: str = "method", than: str = "base") -> Expectation:
    return Expectation(better=better, than=than, metric="map@r")


def one(**variants: VariantResults) -> JudgedStatement:
    (judged,) = judge([statement()], variants, len(BASE), 0)
    return judged


BASE = [0.50, 0.52, 0.49, 0.51, 0.50]
BETTER = [value + gain for value, gain in zip(BASE, (5e-3, 2e-2, 6e-3, 1e-2, 4e-3), strict=True)]


def test_a_verdict_is_that_of_scipy_on_the_seeds_that_both_have():
    base, method = variant(dict(zip(range(5), BASE, strict=True))), variant({1: 0.56, 2: 0.55, 4: 0.53, 7: 0.9})
    judged = one(base=base, method=method)
    expected = stats.ttest_rel([0.56, 0.55, 0.53], [0.52, 0.49, 0.50])
    assert judged.p_value == pytest.approx(expected.pvalue) == judged.corrected_p_value
    assert judged.low == pytest.approx(expected.confidence_interval(0.95).low)
    assert (judged.verdict, judged.corrected_verdict) == ("holds", "holds")
    apart = {"base": base, "method": variant({9: 1})}
    assert judge([statement()], {"base": base}, 5, 0) == () == judge([statement()], apart, 5, 0)


def test_a_difference_that_does_not_matter_is_told_from_one_that_is_not_known():
    method = [value + change for value, change in zip(BASE, (1e-3, -1e-3, 2e-3, 0, -1e-3), strict=True)]
    variants = {"base": variant(BASE), "method": variant(method)}
    half = stats.ttest_rel(method, BASE).confidence_interval(0.95)
    for negligible, word in ((max(-half.low, half.high) * 1.01, "makes no difference"), (half.high * 0.9, None)):
        (judged,) = judge([statement()], variants, len(BASE), 0, negligible)
        assert judged.verdict == judged.corrected_verdict == (word or "not separable at this size")
        assert (judged.runs_to_separate is None) == (word is not None)
        assert verdict_text(judged, variants).startswith(judged.verdict)


def test_looking_again_as_seeds_are_added_takes_more_and_no_number_of_seeds_is_named_that_has_not_decided():
    variants = {"base": variant(BASE), "method": variant(BETTER)}
    once, often = (judge([statement()], variants, len(BASE), more)[0] for more in (0, 8))
    expected = compare_at_looks(PairedFigures(BASE, BETTER), 5, 13)
    assert (often.low, often.p_value) == pytest.approx((expected.low, expected.p_value))
    assert (once.verdict, often.verdict) == ("holds", "not separable at this size")
    assert often.runs_to_separate is not None and often.runs_to_separate <= len(BASE)
    assert verdict_text(often, variants) == often.verdict
    close = {**variants, "method": variant([*BASE[:4], BASE[4] + 0.01])}
    (judged,) = judge([statement()], close, len(BASE), 0)
    assert judged.runs_to_separate is not None and judged.runs_to_separate > len(BASE)
    assert verdict_text(judged, close).endswith(f"about {judged.runs_to_separate} seeds would decide")


def test_the_correction_takes_back_what_one_of_many_statements_says():
    rng = np.random.default_rng(3)
    variants = {"base": variant(BASE), "method": variant(BETTER)}
    for index in range(7):
        variants[f"same{index}"] = variant((np.array(BASE) + rng.normal(0, 0.01, 5)).tolist())
    alone = judge([statement()], variants, len(BASE), 0)
    assert alone[0].verdict == alone[0].corrected_verdict == "holds" and 0.01 < alone[0].p_value < 0.05
    many = judge([statement(), *(statement(f"same{index}") for index in range(7))], variants, len(BASE), 0)
    assert (many[0].verdict, many[0].corrected_verdict) == ("holds", "not separable at this size")
    assert many[0].corrected_p_value == pytest.approx(8 * many[0].p_value)
    assert verdict_text(many[0], variants) == "holds, but not after Holm's correction"


def test_a_statement_is_judged_by_both_figures_and_corrected_for_all_of_them():
    """Against SciPy's test, and Holm's rule as a loop: the p-values ascending, times what is left, never falling."""
    rng = np.random.default_rng(5)
    names, figures = ("base", "method", "other"), ("recall@1", "map@r")
    runs = {
        name: {seed: dict(zip(figures, rng.normal(0.5, 0.02, 2), strict=True)) for seed in range(6)} for name in names
    }
    for seed, row in runs["method"].items():
        row["map@r"] = runs["base"][seed]["map@r"] + 0.05 + 0.01 * rng.normal()
    variants = {name: VariantResults.of(of, figures) for name, of in runs.items()}
    judged = judge(by_both_figures([statement(), statement("other")], figures), variants, 6, 0)
    assert [(one.better, one.metric) for one in judged] == [(n, m) for n in ("method", "other") for m in figures]
    p_values = [
        stats.ttest_rel(*([run[one.metric] for run in runs[name].values()] for name in (one.better, one.than))).pvalue
        for one in judged
    ]
    assert [one.p_value for one in judged] == pytest.approx(p_values)
    corrected, least = dict[int, float](), 0.0
    for left, index in zip((4, 3, 2, 1), sorted(range(4), key=lambda index: p_values[index]), strict=True):
        least = corrected[index] = max(least, min(1.0, left * p_values[index]))
    assert [one.corrected_p_value for one in judged] == pytest.approx([corrected[index] for index in range(4)])
    assert (judged[0].verdict, judged[1].corrected_verdict) == ("not separable at this size", "holds")


CHECKED = ("separated precision@1", "separated map@r", "concatenated map@r")  # by the Reality Check


@pytest.mark.parametrize(
    ("metric", "reported", "judged"),
    [
        ("map@r", ("recall@1", "map@r"), ["recall@1", "map@r"]),
        ("recall@1", ("map@r", "nmi", "recall@1"), ["recall@1", "map@r"]),
        ("nmi", ("recall@1", "nmi", "map@r"), ["nmi"]),
        ("map@r", ("recall@2", "map@r"), ["map@r"]),
        ("separated map@r", CHECKED, ["separated precision@1", "separated map@r"]),
        ("concatenated map@r", CHECKED, ["concatenated map@r"]),
    ],
)
def test_the_figures_of_a_statement_are_those_that_the_study_reports(metric: str, reported: tuple[str, ...], judged):
    stated = Expectation(better="method", than="base", metric=metric, paper="p")
    found = by_both_figures([stated, stated], reported)
    assert [one.metric for one in found] == judged
    assert {(one.better, one.than, one.paper) for one in found} == {("method", "base", "p")}
    assert by_both_figures(found, reported) == found


@pytest.mark.parametrize("gain", [0.05, -0.05])
def test_a_variant_below_its_network_before_training_is_not_trained_never_worse(gain: float):
    base = variant(BASE, pretrained={"map@r": 0.3})
    method = variant([value + gain for value in BASE], pretrained={"map@r": 0.6})
    judged = one(base=base, method=method)
    assert (judged.verdict, judged.not_trained, judged.runs_to_separate) == ("not trained", ("method",), None)
    assert one(base=method, method=base).not_trained == ("base",)
    text = verdict_text(judged, {"base": base, "method": method})
    assert text == "not trained; below the network before training: method (0.6000)"
    assert one(base=base, method=variant(BASE, pretrained={"recall@1": 0.9})).not_trained == ()


@pytest.mark.parametrize(
    ("other", "floor", "verdict"),
    [("recall@1", 0.99, "not trained"), ("recall@1", 0.97, "holds"), ("eer", 0.97, "not trained")],
)
def test_a_variant_that_training_improved_by_the_other_figure_is_judged(other: str, floor: float, verdict: str):
    """By the pair of R@1 and MAP@R; figures of another question do not count, some of which are errors."""
    method = variant([value + 0.05 for value in BASE], pretrained={"map@r": 0.6, other: floor})
    runs = {seed: {**figures, other: 0.98} for seed, figures in method.runs.items()}
    summary = {**method.summary, other: MeanInterval.of([0.98] * len(BASE))}
    judged = one(base=variant(BASE), method=method.model_copy(update={"runs": runs, "summary": summary}))
    assert (judged.verdict, judged.not_trained) == (verdict, ("method",))


def test_equal_figures_on_all_seeds_are_equal_by_construction():
    close = [value + (-1) ** index * 4e-7 for index, value in enumerate(BASE)]
    judged = one(base=variant(BASE), method=variant(close))
    assert (judged.verdict, judged.runs_to_separate, judged.corrected_p_value) == ("equal by construction", None, 1)
    assert one(base=variant(BASE), method=variant([*BASE[:4], BASE[4] + 3e-6])).verdict != judged.verdict
    last = {seed: {"map@r": 0.1 * seed} for seed in range(5)}
    other = variant(BASE, last={**last, 0: {"map@r": 0.7}})
    assert one(base=variant(BASE, last=last), method=other).verdict != judged.verdict
    assert not are_equal({0: {"map@r": 0.5}}, {1: {"map@r": 0.5}})


def test_both_sides_of_a_statement_tell_that_they_were_tuned_at_the_edge():
    low, only = (Tuned(chosen="lr=1", validation={}, edge={"optimizer.lr": end}) for end in ("lowest", "only, highest"))
    variants = {"base": variant(BASE, tuned=low), "method": variant([value + 0.1 for value in BASE], tuned=only)}
    judged = one(**variants)
    assert (judged.verdict, judged.at_edge) == ("holds", ("method", "base"))
    assert verdict_text(judged, variants) == (
        "holds; tuned at the edge: method (optimizer.lr the highest tried, and the only one with the other chosen "
        "values), base (optimizer.lr the lowest tried)"
    )
    assert END_TEXTS.keys() == {*get_args(End)}


STUDY = """\
claim: x
recipe: tiny.yaml
seeds: [0]
overrides:
  sampler: {name: paired, classes_per_batch: 2, images_per_class: 2}
  regularizers: [{name: graph_consistency}]
variants: {a: {}, b: {embedding_dim: 5}}
"""


@pytest.mark.parametrize(
    ("tune", "edges"),
    [
        ("{optimizer.lr: [4e-3, 1e-3, 2e-3]}", ["highest", "lowest", None]),
        ("{training.compile: [false, true]}", [None, None]),
        ("{training.epochs: [1, 3]}", [None, "highest"]),
        ("{optimizer.lr_multipliers.loss: [1, 3]}", ["lowest", "highest"]),
        ("{regularizers.0.weight: [0.1, 0.2]}", ["lowest", "highest"]),  # a key in a list
    ],
)
def test_a_value_lies_at_the_edge_of_the_numbers_that_were_tried(tmp_path: Path, tune: str, edges: list[str | None]):
    candidates = read_study(write_study(tmp_path, f"{STUDY}tune: {tune}\n")).variants[0].candidates
    key = tune[1:].partition(":")[0]
    for candidate, edge in zip(candidates, edges, strict=True):
        assert edges_of(candidates, candidate) == ({} if edge is None else {key: edge})
