"""Local scores: matches of patches against loops over pairs of patches, and `dmlkit eval --with local`."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.manifolds import Euclidean
from dmlkit.metrics import Labeled, score_retrieval
from dmlkit.nearest.matches import match_patches, match_scores, verify_affine
from dmlkit.nearest.rescore import CANDIDATES, Rescorer, rescored_rows
from tests.conftest import Result


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
        found = match_patches(query, b)
        assert found.tolist() == pytest.approx([naive_match(query.numpy(), item.numpy()) for item in b], abs=1e-6)
        assert found.tolist() == pytest.approx([float(match_patches(item, query[None])) for item in b], abs=1e-6)
    assert match_patches(a[0], a[:1]).item() == pytest.approx(1)
    assert match_patches(a[0], a[:1].flip(1)).item() == pytest.approx(1)  # whatever the order of the patches


def test_candidates_are_ordered_by_both_and_the_rest_stays():
    generator = torch.Generator().manual_seed(2)
    points, patches = torch.randn(20, 3, generator=generator, dtype=torch.float64), patches_of(20, 3)
    progress: list[int] = []
    rescorer = Rescorer(match_scores("local", patches.__getitem__, progress.append), 0.3, 7)
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
    rescorer = Rescorer(match_scores("local", patches.__getitem__), 0.0, CANDIDATES)
    found = score_retrieval(Labeled(points, labels), metrics=["recall@1", "map@r"], rerank=rescorer)
    assert found.values == plain.values
    patches = patches[labels]  # patches that tell the classes apart
    rescorer = Rescorer(match_scores("local", patches.__getitem__), 1.0, CANDIDATES)
    assert score_retrieval(Labeled(points, labels), metrics=["map@r"], rerank=rescorer).values["map@r"] == 1


def map_of(places: torch.Tensor, items: torch.Tensor, inliers: torch.Tensor) -> np.ndarray:
    """The affine map (3, 2) that NumPy fits to matches."""
    rows = np.column_stack([places[inliers].numpy(), np.ones(int(inliers.sum()))])
    return np.linalg.lstsq(rows, items[inliers].numpy())[0]


def test_an_affine_map_is_recovered():
    """Of half of the matches, which have small errors, against the known map; random matches fit none."""
    generator = torch.Generator().manual_seed(0)
    places = torch.rand(60, 2, generator=generator)
    linear, moved = torch.tensor([[0.8, 0.5], [-0.6, 0.9]]), torch.tensor([0.2, -0.1])
    noise = torch.rand(2, 60, 2, generator=generator)
    items = torch.stack([places @ linear + moved + 0.004 * (noise[0] - 0.5), noise[1]])
    items[0, 30:] = torch.rand(30, 2, generator=generator)
    matched = torch.ones(2, 60, dtype=torch.bool)
    matched[0, 0] = False
    found = verify_affine(places, items, matched, 0.01)
    assert found[0, 1:30].all() and not found[0, 0] and found[0, 30:].sum() <= 2
    known = torch.cat([linear, moved[None]]).numpy()
    assert map_of(places, items[0], found[0]) == pytest.approx(known, abs=0.005)
    assert found[1].sum() <= 6
    none = verify_affine(places, items, matched & (torch.arange(60) < 2), 0.01)
    assert not none.any()
    mirrored = verify_affine(places, (places * torch.tensor([-1.0, 1.0]))[None], matched[:1], 0.01)
    assert mirrored.sum() <= 6


def test_pairs_of_images_with_few_and_many_matches_are_verified_by_their_own_maps():
    """All matches of pairs that are verified together fit, each pair's by its own map, whatever their numbers."""
    generator = torch.Generator().manual_seed(1)
    places, counts = torch.rand(40, 2, generator=generator), (3, 0, 40, 2, 5)
    known = torch.eye(3)[:, :2] + 0.3 * torch.rand(5, 3, 2, generator=generator)
    items = torch.cat([places, torch.ones(40, 1)], dim=1) @ known
    order = torch.rand(5, 40, generator=generator).argsort(dim=1)
    matched = order < torch.tensor(counts)[:, None]
    items[~matched] = 5.0
    found = verify_affine(places, items, matched, 0.001)
    for row, count in enumerate(counts):
        assert torch.equal(found[row], matched[row] & (count >= 3))


class Photos(Dataset):
    """Images in memory."""

    def __init__(self, images: list[np.ndarray]) -> None:
        super().__init__(torch.zeros(len(images), dtype=torch.int64), ["a"], [str(row) for row in range(len(images))])
        self.images = images

    def sample(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.images[index].copy()).permute(2, 0, 1)


def blobs(seed: int) -> np.ndarray:
    """A photo of noise of several sizes."""
    generator = np.random.default_rng(seed)
    image = np.zeros((240, 240, 3))
    for side in (12, 30, 80):
        noise = generator.integers(0, 255, (side, side, 3)).astype(np.uint8)
        image += np.asarray(Image.fromarray(noise).resize((240, 240), Image.Resampling.BICUBIC)) / 3.0
    return image.astype(np.uint8)


def test_a_turned_and_cropped_photo_verifies_and_another_does_not():
    """The map that the keypoints of both photos give is the one with which the copy was made."""
    pytest.importorskip("cv2", reason="needs OpenCV (pip install 'dmlkit[sift]')")
    from dmlkit.nearest.matches import TOLERANCE, Keypoints, match_keypoints, matches
    from dmlkit.vectors.local_features import keypoints_of

    photo, angle, scale = blobs(0), math.radians(30), 1.2  # the copy is 1.2 times as large, and shows the middle
    back = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]) / scale
    shift = np.array([120.0, 120.0]) - back @ [100.0, 100.0]
    coefficients = (*back[0], shift[0], *back[1], shift[1])
    copied = Image.fromarray(photo).transform(
        (200, 200), Image.Transform.AFFINE, coefficients, Image.Resampling.BICUBIC
    )
    photos = Photos([photo, np.asarray(copied), blobs(1), np.full((60, 60, 3), 128, np.uint8)])
    found = keypoints_of(photos, torch.arange(4))
    keypoints = Keypoints.of(found.packed)  # as a gallery keeps them
    assert torch.equal(keypoints.places, found.places) and torch.equal(keypoints.descriptors, found.descriptors)
    scores = match_keypoints(keypoints, keypoints)(1, torch.arange(4))
    assert scores[1] > 0.99 and scores[0] > 0.6 and scores[2] < 0.35 and scores[3] == 0
    place, matched = matches(keypoints.descriptors[1].float(), keypoints.descriptors[:1].float())
    nearest = keypoints.places[:1].gather(1, place[..., None].expand(-1, -1, 2))
    fitting = verify_affine(keypoints.places[1], nearest, matched, TOLERANCE)[0]
    expected = np.concatenate([back.T * 200 / 240, shift[None] / 240])  # places are by the longer side
    assert fitting.sum() > 20
    assert map_of(keypoints.places[1], nearest[0], fitting) == pytest.approx(expected, abs=0.02)


def test_eval_with_local_scores(patches_run: Path, dmlkit: Callable[..., Result]):
    found = json.loads(dmlkit("eval", patches_run, "--with", "local", "--metric", "recall@1", "--json").out)
    changed = found["alternative"]
    assert changed["fusion"]["run"] == "local" and 0 <= changed["fusion"]["share"] <= 1
    difference = changed["differences"]["recall@1"]["difference"]
    assert difference == pytest.approx(changed["metrics"]["recall@1"] - found["metrics"]["recall@1"])
    assert "of matches of patches (" in dmlkit("eval", patches_run, "--with", "local", "--metric", "recall@1").out


def test_eval_with_keypoints(patches_run: Path, dmlkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    wrong = dmlkit("eval", patches_run, "--with", "sift", "--metric", "recall@1")
    assert wrong.code == 2 and "--with sift: this needs OpenCV; install it with: pip install" in wrong.err, wrong
    monkeypatch.undo()
    pytest.importorskip("cv2", reason="needs OpenCV (pip install 'dmlkit[sift]')")
    found = dmlkit("eval", patches_run, "--with", "sift", "--metric", "recall@1")
    assert found.code == 0 and "of matches of SIFT keypoints (" in found.out, found


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--rerank", "expansion"), "--with local: orders the nearest images itself; remove --rerank"),
        (("--with", "lokal"), "lokal: no run here"),
    ],
)
def test_mistakes(patches_run: Path, dmlkit: Callable[..., Result], more: tuple[str, ...], message: str):
    wrong = dmlkit("eval", patches_run, *([] if "--with" in more else ["--with", "local"]), *more)
    assert wrong.code == 2 and message in wrong.err, wrong.err


def test_too_small_images(patches_run: Path, dmlkit: Callable[..., Result]):
    wrong = dmlkit("eval", patches_run.parent / "small", "--with", "local")
    assert wrong.code == 2 and "no map of at least 64 cells; use larger images" in wrong.err, wrong.err
