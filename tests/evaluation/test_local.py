"""Local scores: matches of patches against loops over pairs of patches, and `dmlkit eval --with local`."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.metrics.ranking import local
from dmlkit.metrics.ranking.local import match_patches, score_candidates
from dmlkit.metrics.scoring import score_retrieval
from tests.conftest import TINY_RECIPE, Result


def patches_of(images: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return nn.functional.normalize(torch.randn(images, 9, 5, generator=generator), dim=-1)


def naive_match(a: np.ndarray, b: np.ndarray) -> float:
    """Go through all pairs of patches."""
    total = 0.0
    for i in range(len(a)):
        j = max(range(len(b)), key=lambda j: a[i] @ b[j])
        if max(range(len(a)), key=lambda k: a[k] @ b[j]) == i:
            total += max(a[i] @ b[j], 0.0)
    return total / len(a)


def test_matches_are_those_of_a_loop():
    a, b = patches_of(6, 0), patches_of(6, 1)
    for query in a:
        found = match_patches(query, b)
        assert found.tolist() == pytest.approx([naive_match(query.numpy(), item.numpy()) for item in b], abs=1e-6)
        assert found.tolist() == pytest.approx([float(match_patches(item, query[None])) for item in b], abs=1e-6)
    assert match_patches(a[0], a[:1]).item() == pytest.approx(1)
    assert match_patches(a[0], a[:1].flip(1)).item() == pytest.approx(1)  # whatever the order of the patches


def test_candidates_are_ordered_by_both_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "CANDIDATES", 7)
    generator = torch.Generator().manual_seed(2)
    points, patches = torch.randn(20, 3, generator=generator, dtype=torch.float64), patches_of(20, 3)
    progress: list[int] = []
    found = score_candidates(Euclidean(3), (points[:4], points), (patches[:4], patches.half()), progress.append)
    assert sum(progress) == 4
    scores = found._replace(share=0.3).rows(Euclidean(3), points[:4], points)(torch.tensor([1, 3]))
    for row, values in zip((1, 3), scores, strict=True):
        distances = (points - points[row]).norm(dim=1)
        order = distances.argsort().tolist()
        mixed = {
            j: -0.7 * distances[j] + 0.3 * naive_match(patches[row].numpy(), patches[j].numpy()) for j in order[:8]
        }
        expected = sorted(mixed, key=lambda j: -float(mixed[j])) + order[8:]
        assert values.argsort(descending=True).tolist() == expected
        chosen = found.candidates[row]
        exact = 0.3 * found.scores[row].double() - 0.7 * distances[chosen]
        torch.testing.assert_close(values[chosen].diff(), exact.diff(), rtol=0, atol=1e-12)  # in float64


def test_without_weight_the_metrics_stay():
    points = nn.functional.normalize(torch.randn(30, 4, generator=torch.Generator().manual_seed(4)), dim=1)
    labels, patches = torch.arange(30) % 5, patches_of(30, 5)
    plain = score_retrieval(points, labels, metrics=["recall@1", "map@r"])
    found = score_candidates(Sphere(4), (points, points), (patches, patches))
    assert score_retrieval(points, labels, metrics=["recall@1", "map@r"], rescore=found).values == plain.values
    patches[torch.arange(30)] = patches[labels]  # patches that tell the classes apart
    found = score_candidates(Sphere(4), (points, points), (patches, patches))._replace(share=1.0)
    assert score_retrieval(points, labels, metrics=["map@r"], rescore=found).values["map@r"] == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dmlkit.training.train import train

    folder = tmp_path_factory.mktemp("local")
    for name, side in (("run", 32), ("small", 16)):
        recipe = TINY_RECIPE.replace("size: 16", f"size: {side}").replace("epochs: 3", "epochs: 1, workers: 0")
        (folder / "recipe.yaml").write_text(recipe)
        train(folder / "recipe.yaml", folder / name, device="cpu")
    return folder / "run"


def test_eval_with_local_scores(run: Path, dmlkit: Callable[..., Result]):
    found = json.loads(dmlkit("eval", run, "--with", "local", "--metric", "recall@1", "--json").out)
    changed = found["alternative"]
    assert changed["fusion"]["run"] == "local" and 0 <= changed["fusion"]["share"] <= 1
    difference = changed["differences"]["recall@1"]["difference"]
    assert difference == pytest.approx(changed["metrics"]["recall@1"] - found["metrics"]["recall@1"])
    assert "of matches of patches (" in dmlkit("eval", run, "--with", "local", "--metric", "recall@1").out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--rerank", "expansion"), "--rerank does not apply to --with local"),
        (("--tta", "flip"), "--tta does not apply to --with"),
        (("--with", "lokal"), "lokal: no run here"),
    ],
)
def test_mistakes(run: Path, dmlkit: Callable[..., Result], more: tuple[str, ...], message: str):
    wrong = dmlkit("eval", run, *([] if "--with" in more else ["--with", "local"]), *more)
    assert wrong.code == 2 and message in wrong.err, wrong.err


def test_too_small_images(run: Path, dmlkit: Callable[..., Result]):
    wrong = dmlkit("eval", run.parent / "small", "--with", "local")
    assert wrong.code == 2 and "no map of at least 64 cells; use larger images" in wrong.err, wrong.err
