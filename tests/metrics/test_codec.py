"""Stored forms of embeddings: what they keep, what a search with them finds, and what eval prints of them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dmlkit.manifolds import Euclidean, Lorentz, Manifold, Sphere
from dmlkit.metrics import Labeled, retrieval_metrics
from dmlkit.metrics.ranking.codec import RESCORED, Codec, Precision, Stored, by_full_points
from dmlkit.metrics.scoring import score_retrieval
from dmlkit.nearest.rescore import rescored_rows
from tests.conftest import Cli
from tests.metrics import naive

LABELS = torch.arange(60) % 6


def points(width: int = 16, count: int = 60) -> torch.Tensor:
    features = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.normalize(features + LABELS.repeat(count // 60)[:, None] * torch.linspace(0, 1, width))


@pytest.mark.parametrize(("precision", "count"), [("fp32", 20), ("fp16", 10), ("int8", 5), ("binary", 1)])
def test_the_decoded_points_are_those_of_a_naive_encoder(precision: Precision, count: int):
    whole = points()
    codec = Codec(Sphere(16), Stored(5, precision), whole[:30])
    kept = whole[:, :5].numpy() / np.linalg.norm(whole[:, :5], axis=1, keepdims=True)
    if precision == "int8":
        low, high = kept[:30].min(0), kept[:30].max(0)  # other points may lie outside
        kept = low + np.rint(np.clip((kept - low) / (high - low), 0, 1) * 255) * (high - low) / 255
    elif precision == "fp16":
        kept = kept.astype(np.float16).astype(np.float32)
    elif precision == "binary":
        kept = np.sign(kept)
    lengths = 1 if precision == "binary" else np.linalg.norm(kept, axis=1, keepdims=True)
    np.testing.assert_allclose(codec.decode(whole), kept / lengths, atol=1e-5)
    assert codec.bytes == count


def test_euclidean_prefixes_are_not_normalized():
    whole = 3 * points()
    assert torch.equal(Codec(Euclidean(16), Stored(4, "fp32"), whole).decode(whole), whole[:, :4])


@pytest.mark.parametrize(
    "manifold",
    [
        *(Euclidean(16, clip_distance=0.9, similarity=name) for name in ("dot", "cosine", "negative_distance")),
        *(Sphere(16, metric=name, similarity="negative_distance") for name in ("chord", "arc")),
    ],
)
def test_the_form_that_keeps_everything_has_the_scores_of_the_embeddings(manifold: Manifold):
    whole = manifold.from_features(points() * torch.linspace(0.1, 3, 60)[:, None])
    codec = Codec(manifold, Stored(None, "fp32"), whole)
    expected = retrieval_metrics(whole, LABELS, manifold=manifold, metrics=["map@r"])
    assert retrieval_metrics(codec.decode(whole), LABELS, manifold=codec.space, metrics=["map@r"]) == expected
    half = Codec(manifold, Stored(8, "fp32"), whole)
    x = half.decode(whole)
    torch.testing.assert_close(half.space.similarity(x, x), manifold.similarity(*[torch.cat([x, 0 * x], 1)] * 2))


@pytest.mark.parametrize("width", [8, 11])  # products of 1 / sqrt(8) are rounded, so that equal distances would differ
def test_binary_vectors_of_equal_hamming_distance_tie(width: int):
    whole = points(width)
    codec = Codec(Sphere(width), Stored(None, "binary"), whole)
    scored = retrieval_metrics(codec.decode(whole), LABELS, manifold=codec.space, metrics=["map"], ties="pessimistic")
    signs, values = np.sign(whole.numpy()), list[float]()
    for query in range(60):
        others = np.delete(np.arange(60), query)
        agreed = (signs[others] == signs[query]).sum(1).tolist()
        values.append(naive.pessimistic(agreed, (LABELS[others] == LABELS[query]).tolist(), "map", 60))
    assert scored["map"] == pytest.approx(np.mean(values), rel=1e-9)


def test_candidates_are_ordered_again_by_the_full_points():
    whole = points(count=240)
    codec = Codec(Sphere(16), Stored(None, "rescored"), whole)
    stored, block = codec.decode(whole), torch.tensor([0, 7, 200])
    rows = rescored_rows(by_full_points(Sphere(16), whole, whole), codec.space, stored, stored)(block).numpy()
    for row, query in zip(rows, block.tolist(), strict=True):
        hamming, exact = ((whole > 0) != (whole[query] > 0)).sum(1).numpy(), (whole @ whole[query]).numpy()
        order = np.argsort(-row, kind="stable")
        first, rest = order[: RESCORED + 1], order[RESCORED + 1 :]
        assert hamming[first].max() <= hamming[rest].min()
        assert (np.diff(exact[first]) <= 1e-6).all() and (np.diff(hamming[rest]) >= 0).all()


def test_rescoring_all_candidates_equals_the_full_search():
    whole, metrics = points(), ["recall@1", "map@r"]
    codec = Codec(Sphere(16), Stored(None, "rescored"), whole)
    rescore = by_full_points(Sphere(16), whole, whole)
    scored = score_retrieval(Labeled(codec.decode(whole), LABELS), None, codec.space, metrics, rerank=rescore)
    assert scored.values == pytest.approx(retrieval_metrics(whole, LABELS, metrics=metrics))


FORMS = [word for form in ("16", "16:int8", "16:rescored", "4", "4:int8", "4:rescored") for word in ("--form", form)]


def test_eval_compares_stored_forms(tmp_path: Path, dmlkit: Cli):
    whole = points()
    np.save(tmp_path / "x.npy", whole.numpy())
    np.save(tmp_path / "y.npy", LABELS.numpy())
    words = ("eval", tmp_path / "x.npy", "--labels", tmp_path / "y.npy", "--metric", "map@r", "--metric", "nmi")
    report = dmlkit(*words, *FORMS, "--json").json()
    forms = {(form["dims"], form["precision"]): form for form in report["forms"]}
    assert [form["bytes"] for form in report["forms"]] == [64, 16, 2, 16, 4, 1]
    assert forms[16, "fp32"]["differences"]["map@r"]["difference"] == 0
    expected = retrieval_metrics(whole[:, :4], LABELS, metrics=["map@r"])["map@r"]
    short = forms[4, "fp32"]
    assert short["metrics"] == {"map@r": pytest.approx(expected)}
    change = short["differences"]["map@r"]
    assert change["difference"] == pytest.approx(expected - report["metrics"]["map@r"])
    assert change["low"] <= change["difference"] <= change["high"]
    assert any("int8: the ranges of the coordinates are those of the evaluated" in note for note in report["notes"])
    shown = dmlkit(*words, "--form", "fp16").out
    assert "map@r of stored forms" in shown and "fp16" in shown
    for more, message in (
        (("--form", "32"), "--form 32: the embeddings have 16 coordinates; give at most 16"),
        *(
            (
                ("--form", form),
                f"--form {form!r}: expected a number of coordinates, fp32, fp16, int8, binary, rescored, or",
            )
            for form in ("int4", "0", "4:", ":int8", "4int8", "int8:4", "4:4", "a\nb", "")
        ),
        (("--form", "binary", "--manifold", "euclidean"), "signs keep directions alone"),
    ):
        dmlkit(*words, *more).refused(message)


@pytest.mark.parametrize("precision", ["int8", "binary"])
def test_hyperbolic_points_are_refused(precision: Precision):
    with pytest.raises(ValueError, match="points of lorentz leave the space"):
        Codec(Lorentz(4), Stored(None, precision), torch.zeros(1, 5))
