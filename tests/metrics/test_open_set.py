"""Open-set figures against loops that follow the protocol word for word."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from dmlkit.manifolds import Euclidean, Poincare, Sphere
from dmlkit.metrics import Labeled, metric_configs, retrieval_metrics, score_retrieval

NAMES = ["auroc_unknown", "oscr", "baks@threshold=-1.5", "baus@threshold=-1.5"]


def answers(queries, gallery, gallery_ids=None, ids=None):
    """(label, score, answer) of each query by 1-D distance; the first of several items is the answer."""
    found = []
    for q, (x, label) in enumerate(queries):
        best = None
        for g, (y, item_label) in enumerate(gallery):
            hidden = ids is not None and ids[q] == gallery_ids[g]
            if not hidden and (best is None or -abs(x - y) > best[0]):
                best = (-abs(x - y), item_label)
        found.append((label, *(best or (-np.inf, None))))
    return found


def naive(found, unknown):
    known, others = [row for row in found if row[0] not in unknown], [row for row in found if row[0] in unknown]
    beats = [[(k[1] > u[1]) + (k[1] == u[1]) / 2 for u in others] for k in known]
    right = [k[0] == k[2] for k in known]
    kept, rejected = {}, {}
    for (label, score, _), ok in zip(known, right, strict=True):
        kept.setdefault(label, []).append(ok and score >= -1.5)
    for label, score, _ in others:
        rejected.setdefault(label, []).append(score < -1.5)
    return {
        "auroc_unknown": np.mean(beats),
        "oscr": np.mean([np.mean(row) * ok for row, ok in zip(beats, right, strict=True)]),
        "baks@threshold=-1.5": np.mean([np.mean(values) for values in kept.values()]),
        "baus@threshold=-1.5": np.mean([np.mean(values) for values in rejected.values()]),
    }


items = st.lists(st.tuples(st.integers(-6, 6), st.integers(0, 4)), min_size=3, max_size=14)


@settings(deadline=None, max_examples=40)
@given(items)
def test_among_themselves_against_loops(data):
    classes = sorted({label for _, label in data})
    if len(classes) < 2 or len(classes) == len(data):
        return
    unknown = set(classes[len(classes) - int(len(classes) * 0.5 + 0.5) :])
    points, labels = torch.tensor([[float(x)] for x, _ in data]), [label for _, label in data]
    order = dict.fromkeys(classes, 0)
    gallery, queries = [], []
    for item in data:
        label, size = item[1], sum(other[1] == item[1] for other in data)
        enrolled = label not in unknown and 2 * order[label] < size
        (gallery if enrolled else queries).append(item)
        order[label] += 1
    if all(label in unknown for _, label in queries):
        with pytest.raises(ValueError, match="open-set metrics need"):
            retrieval_metrics(points, labels, manifold=Euclidean(1), metrics=NAMES)
        return
    ours = score_retrieval(Labeled(points, labels), manifold=Euclidean(1), metrics=NAMES)
    assert ours.values == pytest.approx(naive(answers(queries, gallery), unknown), abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(items, items)
def test_queries_and_a_gallery_against_loops(queries, gallery):
    """The first query is in the gallery too, and does not find itself."""
    gallery = [*gallery, queries[0]]
    ids, gallery_ids = list(range(len(queries))), [*range(100, 99 + len(gallery)), 0]
    classes = sorted({label for _, label in [*queries, *gallery]})
    unknown = set(classes[max(1, len(classes) - max(1, int(len(classes) * 0.3 + 0.5))) :])
    arrays = []
    for side in (queries, gallery):
        arrays += [torch.tensor([[float(x)] for x, _ in side]), [label for _, label in side]]
    if len(classes) < 2 or not any(a == b for a in arrays[1][1:] for b in arrays[3]):
        return
    kept = [(item, i) for item, i in zip(gallery, gallery_ids, strict=True) if item[1] not in unknown]
    asked = {label in unknown for _, label in queries}
    configs = [
        type(config).model_validate({**config.model_dump(), "unknown_fraction": 0.3})
        for config in metric_configs(NAMES)
    ]
    if not kept or len(asked) < 2:
        with pytest.raises(ValueError, match="open-set metrics need"):
            retrieval_metrics(*arrays, Euclidean(1), configs, ids=(ids, gallery_ids))
        return
    ours = score_retrieval(Labeled(*arrays[:2], ids), Labeled(*arrays[2:], gallery_ids), Euclidean(1), configs)
    found = answers(queries, [item for item, _ in kept], [i for _, i in kept], ids)
    assert ours.values == pytest.approx(naive(found, unknown), abs=1e-12)


@pytest.mark.parametrize("manifold", [Sphere(6), Poincare(6)], ids=["sphere", "poincare"])
def test_the_roc_of_scikit_learn(manifold):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 10
    features = torch.randn(10, 6, generator=generator)[labels] + torch.randn(200, 6, generator=generator)
    points = manifold.from_features(features).detach()
    gallery, known = torch.arange(100)[labels[:100] < 5], torch.arange(100, 200)[labels[100:] < 5]
    unknown = (labels >= 5).nonzero()[:, 0]
    scores = [manifold.similarity(points[rows], points[gallery]).amax(1).detach() for rows in (known, unknown)]
    theirs = roc_auc_score([1] * len(known) + [0] * len(unknown), torch.cat(scores))
    ours = retrieval_metrics(points, labels, manifold=manifold, metrics=["auroc_unknown"])
    assert ours["auroc_unknown"] == pytest.approx(theirs, abs=1e-4)


def test_a_threshold_is_given():
    with pytest.raises(ValueError, match="'baks': expected baks@threshold=x, with a number for x"):
        metric_configs(["baks"])


@pytest.mark.parametrize("name", NAMES)
def test_a_level_of_one_class_has_no_unknown_ones(name: str):
    levels = {"genus": [0] * 6, "species": [0, 0, 1, 1, 2, 2]}
    with pytest.raises(ValueError, match=r"got 0 gallery images of known classes, .* 6 of unknown classes; open-set"):
        retrieval_metrics(torch.randn(6, 3), levels, metrics=[f"{name}:genus"])
