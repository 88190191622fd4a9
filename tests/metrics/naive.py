"""The metrics written straight from their definitions, in float64 loops; ties by trying every order."""

from collections.abc import Sequence
from itertools import combinations, product
from math import log2


def at_rank(hits: Sequence[int], positives: int, name: str, k: int) -> float:
    """One metric of one hit list without ties, k already clipped."""
    precision = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    match name:
        case "recall" | "cmc":
            return float(any(hits[:k]))
        case "precision":
            return sum(hits[:k]) / k
        case "r_precision":
            return sum(hits[:positives]) / positives
        case "map@r":
            return sum(precision[i] * hits[i] for i in range(positives)) / positives
        case "map":
            return sum(precision[i] * hits[i] for i in range(k)) / min(positives, k)
        case "mrr":
            return 1 / (hits.index(1) + 1)
        case "ndcg":
            gain = sum(hits[i] / log2(i + 2) for i in range(k))
            return gain / sum(1 / log2(i + 2) for i in range(min(positives, k)))
    raise AssertionError(name)


def orders(groups: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Every hit list of groups (tied items, hits among them), best group first; all are equally probable."""
    choices = []
    for size, hits in groups:
        choices.append([[int(i in chosen) for i in range(size)] for chosen in combinations(range(size), hits)])
    return [[hit for part in parts for hit in part] for parts in product(*choices)]


def tie_groups(scores: Sequence[float], hits: Sequence[bool]) -> list[tuple[int, int]]:
    """(size, hits) of the items of each score, highest score first."""
    return [
        (sum(s == level for s in scores), sum(h for s, h in zip(scores, hits, strict=True) if s == level))
        for level in sorted(set(scores), reverse=True)
    ]


def expected(scores: Sequence[float], hits: Sequence[bool], name: str, k: int = 1) -> float:
    """The mean of a metric over all orders of the tied items."""
    lists = orders(tie_groups(scores, hits))
    return sum(at_rank(order, sum(hits), name, min(k, len(scores))) for order in lists) / len(lists)


def pessimistic(scores: Sequence[float], hits: Sequence[bool], name: str, k: int = 1) -> float:
    """A metric with the hits last among the tied items."""
    order = [hit for size, right in tie_groups(scores, hits) for hit in [0] * (size - right) + [1] * right]
    return at_rank(order, sum(hits), name, min(k, len(scores)))
