"""The bound on wrong labels: its martingales by enumeration, a naive loop, and how often it is violated."""

import itertools
from math import prod
from statistics import fmean

import numpy as np
import pytest

from dmlkit.metrics.audit import RATES, LabelAudit, most_wrong_together

PROBABILITIES = [0.9, 0.6, 0.95, 0.7, 0.8]
STEPS = ("draw", "doubt", "draw", "draw")


def naive_factor(rate: float, true: float, *, is_wrong: bool) -> float:
    rate = min(rate, 0.5)
    if rate >= true:
        return 1.0
    return rate / true if is_wrong else (1 - rate) / (1 - true)


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_the_mean_over_all_orders_of_draws_is_at_most_one(wrong: int):
    """Over every set of wrong labels and every result of the draws, with a doubtful label checked in between."""
    total, weight = np.zeros(len(RATES)), 0.0
    for faults in itertools.combinations(range(5), wrong):
        for order in itertools.product(range(5), repeat=3):
            audit, drawn, chance, products = LabelAudit(PROBABILITIES), iter(order), 1.0, np.ones(len(RATES))
            for step in STEPS:
                left = np.flatnonzero(audit.left)
                if step == "doubt":
                    row = min(left.tolist(), key=lambda row: PROBABILITIES[row])
                else:
                    row = next(drawn)
                    if row not in left:
                        chance = 0.0
                        break
                    chance /= len(left)
                    checked = sum(1 - PROBABILITIES[one] for one in set(range(5)) - set(left.tolist()))
                    expected = fmean(1 - PROBABILITIES[one] for one in left) * (audit.found + 4) / (checked + 4)
                    true = (wrong - audit.found) / len(left)
                    products *= [naive_factor(rate * expected, true, is_wrong=row in faults) for rate in RATES]
                audit.add(row, is_wrong=row in faults, is_draw=step == "draw")
            if chance:
                found = np.exp(audit._logs[:, wrong])
                np.testing.assert_allclose(found, products, rtol=1e-9)
                total, weight = total + chance * found, weight + chance
    assert weight == pytest.approx(len(list(itertools.combinations(range(5), wrong))))
    mean = total / weight  # below 1 if all the labels that are left may be wrong: then a right one has no chance
    assert (mean <= 1 + 1e-9).all() and (wrong > 1 or mean.min() == pytest.approx(1.0))


def test_draws_without_a_wrong_label_against_a_loop():
    audit = LabelAudit([0.99] * 200, error=0.1)
    for row in range(120):
        audit.add(row, is_wrong=False, is_draw=True)

    def bet(checked: int) -> float:
        return 0.01 * 4 / (0.01 * checked + 4)  # none of the checked labels was wrong

    def evidence(total: int) -> float:
        factors = [
            prod(naive_factor(rate * bet(t), min(total / (200 - t), 1 - 1e-12), is_wrong=False) for t in range(120))
            for rate in RATES
        ]
        return sum(factors) / len(factors)

    possible = [total for total in range(81) if evidence(total) < 10]
    assert audit.most_wrong() == max(possible) and 0 < max(possible) < 20
    found = audit.evidence()
    exact = next(total for total in range(5, 20) if -np.log(np.exp(-found[total])) == found[total])
    audit.error = float(
        np.exp(-found[exact])
    )  # a martingale that reaches 1 / error, which has a chance of at most error
    assert audit.most_wrong() == exact - 1


@pytest.mark.parametrize("probability", [0.85, 0.9, 0.93])
def test_about_right_probabilities_lose_little_to_the_ideal_bet(probability: float):
    """The ideal bet is on one wrong label in ten, against a total of one in five. A mean of two bets loses log 2."""
    audit, ideal = LabelAudit([probability] * 200), 0.0
    for row in range(100):
        is_wrong = row % 10 == 0
        ideal += np.log(naive_factor(0.1, (40 - audit.found) / (200 - row), is_wrong=is_wrong))
        audit.add(row, is_wrong=is_wrong, is_draw=True)
    assert audit.evidence()[40] > ideal - np.log(len(RATES)) - 0.8 > 4


def test_all_labels_checked_leave_none_wrong():
    audit = LabelAudit([0.5] * 4)
    for row, wrong in enumerate((True, False, True, False)):
        assert audit.most_wrong() <= 4 - row
        audit.add(row, is_wrong=wrong, is_draw=row % 2 == 0)
    assert (audit.most_wrong(), audit.found) == (0, 2)
    with pytest.raises(ValueError, match="label 1 was checked already"):
        audit.add(1, is_wrong=False, is_draw=True)


@pytest.mark.parametrize(("probabilities", "error"), [([], 0.05), ([1.2], 0.05), ([0.5], 0.0), ([0.5], 1.0)])
def test_labels_and_error_out_of_range(probabilities: list[float], error: float):
    with pytest.raises(ValueError, match="LabelAudit: expected"):
        LabelAudit(probabilities, error)


def test_the_bound_is_violated_in_few_sessions():
    """With an error of 0.2, so that 150 sessions tell; probabilities that are far too high must not matter."""
    random, violated = np.random.default_rng(0), np.zeros(2)
    for _ in range(150):
        right = [random.random(60) < 0.85, random.random(20) < 0.7]
        audits = [LabelAudit(0.95 + 0.04 * right[0], error=0.2)]
        is_violated = np.zeros(2, dtype=bool)
        while any(audit.left.any() for audit in audits):
            if len(audits) == 1 and audits[0].left.sum() < 40:
                audits.append(LabelAudit([0.95] * 20, error=0.2))  # labels that later answers are copied to
            which = max(range(len(audits)), key=lambda one: audits[one].most_wrong() if audits[one].left.any() else -1)
            audit = audits[which]
            left = np.flatnonzero(audit.left)
            is_draw = bool(random.random() < 0.7)
            row = int(random.choice(left)) if is_draw else int(left[0])
            audit.add(row, is_wrong=not right[which][row], is_draw=is_draw)
            wrong = [int((~one & audit.left).sum()) for one, audit in zip(right, audits, strict=False)]
            is_violated |= [wrong[0] > audits[0].most_wrong(), sum(wrong) > most_wrong_together(audits)]
        violated += is_violated
    assert (violated / 150 < 0.2 + 2 * (0.2 * 0.8 / 150) ** 0.5).all()


def test_the_bound_on_several_audits_against_all_totals():
    random = np.random.default_rng(1)
    audits = [LabelAudit([0.9] * 30), LabelAudit([0.95] * 12), LabelAudit([0.8] * 5)]
    for audit, draws, wrong in zip(audits, (25, 7, 2), (2, 0, 1), strict=True):
        for number, row in enumerate(random.permutation(len(audit.left))[:draws]):
            audit.add(int(row), is_wrong=number < wrong, is_draw=True)
    left = [range(int(audit.left.sum()) + 1) for audit in audits]
    evidence = [audit.evidence() for audit in audits]
    kept = [
        sum(wrong)
        for wrong in itertools.product(*left)
        if sum(one[audit.found + count] for one, audit, count in zip(evidence, audits, wrong, strict=True))
        < -np.log(0.05)
    ]
    assert most_wrong_together(audits) == max(kept) < sum(audit.most_wrong() for audit in audits)
    assert most_wrong_together(audits[:1]) == audits[0].most_wrong() < 5


def test_as_many_more_draws_as_estimated_lower_the_bound_and_few_of_them_are_needless():
    audit, reached = LabelAudit([0.99] * 400), 0
    for row in range(40):
        audit.add(row, is_wrong=False, is_draw=True)
    (more,) = audit.draws_until(8, np.zeros(1), np.array([360.0])).tolist()
    while audit.most_wrong() > 8:
        audit.add(40 + reached, is_wrong=False, is_draw=True)
        reached += 1
    assert 50 < reached <= more <= 1.25 * reached
    left = np.array([360.0, 9.0, 8.0])
    assert audit.draws_until(8, np.array([200.0, 9.0, 0.0]), left).tolist() == [360.0, 9.0, 0.0]  # too many wrong, none
