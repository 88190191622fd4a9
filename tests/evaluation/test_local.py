"""Local scores: matches of patches against loops over pairs of patches, and `dmlkit eval --with local`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dmlkit.manifolds import Euclidean
from dmlkit.metrics import Labeled, score_retrieval
from dmlkit.nearest.rescore import CANDIDATES, Rescorer, match_patches, match_scores, rescored_rows
from tests.conftest import Cli


def patches_of(images: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return nn.functional.normalize(torch.randn(images, 9, 5, generator=generator), dim=-1)


def naive_match(a: np.ndarray, b: np.ndarray) -> float:
    """Go through all pairs of patches."""
    total, products = 0.0, (a @ b.T).tolist()
    for i in range(len(a)):
        j = max(range(len(b)), key=lambda j: products[i][j])
        if max(range(len(a)), key=lambda k: products[k][j]) == i:
            total += max(products[i][j], 0.0)
    return total / len(a)


def test_matches_are_those_of_a_loop():
    a, b = patches_of(6, 0), patches_of(6, 1)
    for query in a:
        matched = match_patches(query, b)
        assert matched.tolist() == pytest.approx([naive_match(query.numpy(), item.numpy()) for item in b], abs=1e-6)
        assert matched.tolist() == pytest.approx([float(match_patches(item, query[None])) for item in b], abs=1e-6)
    assert match_patches(a[0], a[:1]).item() == pytest.approx(1)
    assert match_patches(a[0], a[:1].flip(1)).item() == pytest.approx(1)  # whatever the order of the patches


def test_candidates_are_ordered_by_both_and_the_rest_stays():
    generator = torch.Generator().manual_seed(2)
    points, patches = torch.randn(20, 3, generator=generator, dtype=torch.float64), patches_of(20, 3)
    progress: list[int] = []
    rescorer = Rescorer(match_scores(patches.__getitem__, progress.append), 0.3, 7)
    scores = rescored_rows(rescorer, Euclidean(3), points[:4], points)(torch.tensor([1, 3]))
    assert sum(progress) == 2
    for row, values in zip((1, 3), scores, strict=True):
        distances = (points - points[row]).norm(dim=1)
        order = distances.argsort().tolist()
        matches = [naive_match(patches[row].numpy(), patches[j].numpy()) for j in order[:8]]
        mixed = {j: 0.3 * match - 0.7 * float(distances[j]) for j, match in zip(order, matches, strict=False)}
        expected = sorted(mixed, key=lambda j: -mixed[j])
        assert values.argsort(descending=True).tolist() == expected + order[8:]
        exact = torch.tensor([mixed[j] for j in expected], dtype=torch.float64)
        torch.testing.assert_close(values[expected].diff(), exact.diff(), rtol=0, atol=1e-6)  # matches in float32


def test_without_weight_the_metrics_stay():
    points = nn.functional.normalize(torch.randn(30, 4, generator=torch.Generator().manual_seed(4)), dim=1)
    labels, patches = torch.arange(30) % 5, patches_of(30, 5)
    plain = score_retrieval(Labeled(points, labels), metrics=["recall@1", "map@r"])
    rescorer = Rescorer(match_scores(patches.__getitem__), 0.0, CANDIDATES)
    scored = score_retrieval(Labeled(points, labels), metrics=["recall@1", "map@r"], rerank=rescorer)
    assert scored.values == plain.values
    patches = patches[labels]  # patches that tell the classes apart
    rescorer = Rescorer(match_scores(patches.__getitem__), 1.0, CANDIDATES)
    assert score_retrieval(Labeled(points, labels), metrics=["map@r"], rerank=rescorer).values["map@r"] == 1


def test_eval_with_local_scores(patches_run: Path, dmlkit: Cli):
    report = dmlkit("eval", patches_run, "--with", "local", "--metric", "recall@1", "--json").json()
    changed = report["alternative"]
    assert changed["fusion"]["run"] == "local" and 0 <= changed["fusion"]["share"] <= 1
    difference = changed["differences"]["recall@1"]["difference"]
    assert difference == pytest.approx(changed["metrics"]["recall@1"] - report["metrics"]["recall@1"])
    assert "of matches of patches (" in dmlkit("eval", patches_run, "--with", "local", "--metric", "recall@1").out


def test_mistakes(patches_run: Path, trained_once: Callable[..., Path], tmp_path: Path, dmlkit: Cli):
    with_local = ("--with", "local")
    message = "--with local: orders the nearest images itself; remove --rerank"
    dmlkit("eval", patches_run, *with_local, "--rerank", "expansion").refused(message)
    dmlkit("eval", trained_once(tmp_path), *with_local).refused("no map of at least 64 cells; use larger")
