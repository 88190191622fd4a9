"""Losses over ranks: loops straight from the papers, peers, and what they share: chunks, memory, nothing to order."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytorch_metric_learning.losses import SmoothAPLoss
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from dmlkit.losses import ROADMAP, CrossBatchMemory, FastAP, RecallSurrogate, SmoothAP, SupCon, ranks
from dmlkit.losses.pair_loss import Pairs
from dmlkit.manifolds import Sphere
from tests.losses.conftest import value_and_gradient

LOSSES = [SmoothAP, RecallSurrogate, ROADMAP]


def average_precisions(x, labels):
    """Of each query that has a positive."""
    found = []
    for q in range(len(x)):
        order = [i for i in (x @ x[q]).argsort(descending=True).tolist() if i != q]
        hits = [place for place, i in enumerate(order, start=1) if labels[i] == labels[q]]
        found += [sum(count / place for count, place in enumerate(hits, start=1)) / len(hits)] if hits else []
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.1, 1e-4])  # the second has differences at which sigmoids are 0
@pytest.mark.parametrize("kind", LOSSES)
def test_neither_chunks_nor_a_list_of_positives_change_the_loss(pair_batch, kind, temperature, monkeypatch):
    x, labels = pair_batch
    loss = partial(kind(Sphere(4), temperature=temperature), labels=labels)
    expected = value_and_gradient(loss, x)
    monkeypatch.setattr(ranks, "CHUNK", 50)  # 4 pairs of 12 columns
    torch.testing.assert_close(value_and_gradient(loss, x), expected)
    monkeypatch.setattr(ranks, "may_list", lambda positive: False)  # as a GPU for small batches
    torch.testing.assert_close(value_and_gradient(loss, x), expected)


@pytest.mark.parametrize("kind", LOSSES)
def test_no_tensor_is_larger_than_the_pairs_or_a_chunk(kind, monkeypatch):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(one, torch.Tensor):
                    self.numel = max(self.numel, one.numel())
            return out

    monkeypatch.setattr(ranks, "CHUNK", 2**15)
    points, labels = normalize(torch.randn(240, 4), dim=1), torch.arange(240) // 8
    with Largest() as largest:
        value_and_gradient(partial(kind(Sphere(4)), labels=labels), points)
    assert largest.numel == 240 * 240  # 1 680 positives x 240 columns would be 403 200


@pytest.mark.parametrize("kind", [*LOSSES, FastAP, SupCon])
@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 2, 3], [0]], ids=["one class", "no pair", "one image"])
def test_without_anything_to_order_loss_and_gradient_are_0(kind, labels):
    points = normalize(torch.randn(len(labels), 4), dim=1)
    value, gradient = value_and_gradient(partial(kind(Sphere(4)), labels=torch.tensor(labels)), points)
    assert value == 0 and not gradient.any()


def naive(x, labels, tau):
    """The equation of the paper, one query, positive and comparison at a time."""
    rows, losses = range(len(x)), []
    for q in rows:
        positives = [i for i in rows if i != q and labels[i] == labels[q]]
        negatives = [i for i in rows if labels[i] != labels[q]]
        if positives and negatives:
            precisions = []
            for i in positives:
                steps = {j: 1 / (1 + (-(x[q] @ x[j] - x[q] @ x[i]) / tau).exp()) for j in positives + negatives}
                rank_among_positives = 1 + sum(steps[j] for j in positives if j != i)
                precisions.append(rank_among_positives / (rank_among_positives + sum(steps[j] for j in negatives)))
            losses.append(1 - sum(precisions) / len(positives))
    return sum(losses) / len(losses)


def test_narrow_sigmoids_give_the_average_precision(pair_batch):
    x, labels = pair_batch
    value = SmoothAP(Sphere(4), temperature=1e-6)(x, labels)
    torch.testing.assert_close(value, 1 - average_precisions(x, labels).mean())


@given(st.lists(st.booleans(), min_size=9, max_size=9).filter(lambda hits: any(hits) and not all(hits)))
def test_a_bin_for_each_distance_gives_the_average_precision(hits):
    """Of nine images at the squared chords 0.4, 0.8, ... 3.6."""
    angle = torch.arccos(1 - torch.arange(1, 10, dtype=torch.float64) / 5)
    columns, positive = torch.stack([angle.cos(), angle.sin()], 1), torch.tensor([hits])
    pairs = Pairs(torch.tensor([[1.0, 0.0]], dtype=torch.float64), columns, torch.tensor([0]), positive, ~positive)
    expected = 1 - average_precision_score(hits, range(9, 0, -1))
    assert FastAP(Sphere(2), bins=10).compute_pairs(pairs).item() == pytest.approx(expected, abs=1e-9)


def test_equals_pytorch_metric_learning(assert_equals):
    """It follows the authors' code, where a query is one of its positives; and is right for as many classes as images
    of a class, sorted, because it reshapes the batch by the wrong one of the two numbers. It sums in float32."""
    x = normalize(torch.randn(16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=1)
    labels = torch.arange(4).repeat_interleave(4)
    same = labels[:, None] == labels
    loss, peer = SmoothAP(Sphere(4), temperature=0.1), SmoothAPLoss(0.1)
    assert_equals(
        lambda x: loss.compute_pairs(Pairs(x, x, labels, same, ~same)), lambda x: peer(x, labels).double(), x, rtol=2e-6
    )


def step(t, tau, rho, delta):
    if t <= 0:
        return 1 / (1 + (-t / tau).exp())
    if t <= delta:
        return 1 / (1 + (-t / tau).exp()) + 0.5
    return rho * (t - delta) + 1 / (1 + torch.exp(torch.tensor(-delta / tau, dtype=t.dtype))) + 0.5


def naive_roadmap(x, labels, tau, rho, delta, weight, alpha, beta):
    """The equations of the paper, one query, positive and comparison at a time."""
    rows, losses = range(len(x)), []
    for q in rows:
        s = [x[q] @ other for other in x]
        positives = [i for i in rows if i != q and labels[i] == labels[q]]
        negatives = [i for i in rows if labels[i] != labels[q]]
        if positives and negatives:
            precisions = []
            for i in positives:
                above = sum(s[j] >= s[i] for j in positives)
                precisions.append(above / (above + sum(step(s[j] - s[i], tau, rho, delta) for j in negatives)))
            pull = sum(torch.relu(alpha - s[i]) for i in positives) / len(positives)
            push = sum(torch.relu(s[j] - beta) for j in negatives) / len(negatives)
            losses.append((1 - weight) * (1 - sum(precisions) / len(positives)) + weight * (pull + push))
    return sum(losses) / len(losses)


def test_bounds_the_average_precision():
    """Without calibration it is at least 1 - AP, which no sigmoid promises."""
    labels, above = torch.arange(30) // 3, 0
    loss = ROADMAP(Sphere(3), calibration_weight=0.0)
    for seed in range(5):
        x = normalize(torch.randn(30, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=1)
        value, exact = float(loss(x, labels)), 1 - float(average_precisions(x, labels).mean())
        assert value >= exact
        above += value - exact
    assert 0 < above / 5 < 0.5


def naive_recall_surrogate(x, labels, at, tau_1, tau_2):
    """The equations of the paper, one query, positive and comparison at a time."""
    rows, losses = range(len(x)), []
    for q in rows:
        positives = [i for i in rows if i != q and labels[i] == labels[q]]
        if positives and len(positives) + 1 < len(x):
            ranks = [
                1 + sum(1 / (1 + (-(x[q] @ x[j] - x[q] @ x[i]) / tau_2).exp()) for j in rows if j not in (i, q))
                for i in positives
            ]
            for k in at:
                found = sum(1 / (1 + (-(k - rank) / tau_1).exp()) for rank in ranks)
                losses.append(1 - torch.clamp(found / min(k, len(positives)), max=1))
    return sum(losses) / len(losses)


ROADMAP_KEYS = "temperature slope sigmoid_end calibration_weight positive_threshold negative_threshold"
LOOPS = [  # loss, loop, and options in the loop's order
    (SmoothAP, naive, "temperature", [(0.01,), (0.2,)]),
    (ROADMAP, naive_roadmap, ROADMAP_KEYS, [(0.01, 100.0, 0.05, 0.5, 0.9, 0.6), (0.2, 3.0, 0.4, 0.9, 0.3, 0.1)]),
    (
        RecallSurrogate,
        naive_recall_surrogate,
        "at rank_temperature temperature",
        [((1, 2, 4, 8, 16), 1.0, 0.01), ((1,), 0.3, 0.2), ((2, 3), 9.0, 0.1)],
    ),
]


@pytest.mark.parametrize(
    ("kind", "loop", "keys", "values"), [(*case, values) for *case, every in LOOPS for values in every]
)
def test_equals_the_triple_loop(pair_batch, assert_equals, kind, loop, keys, values):
    x, labels = pair_batch
    loss = kind(Sphere(4), **dict(zip(keys.split(), values, strict=True)))
    assert_equals(lambda x: loss(x, labels), lambda x: loop(x, labels, *values), x)


def test_narrow_sigmoids_give_the_recall(pair_batch):
    x, labels = pair_batch
    missed = []
    for q in range(len(x)):
        order = [i for i in (x @ x[q]).argsort(descending=True).tolist() if i != q]
        positives = int((labels == labels[q]).sum()) - 1
        if positives:
            first, second, third = (int(labels[i] == labels[q]) for i in order[:3])
            missed.append(1 - (first + second + third / 2) / min(3, positives))  # g(k - r) = 1/2 at rank k
    loss = RecallSurrogate(Sphere(4), at=(3,), rank_temperature=1e-4, temperature=1e-6)
    assert loss(x, labels).item() == pytest.approx(sum(missed) / len(missed))


def test_mixup_equals_virtual_embeddings(pair_batch, assert_equals):
    """Inner products of a x + (1 - a) z are mixed similarities: the authors mix the embeddings themselves."""
    x, labels = pair_batch
    pairs = [(i, j) for i in range(12) for j in range(i + 1, 12) if labels[i] == labels[j]]

    def with_virtual(x):
        share = torch.rand(len(pairs), generator=torch.manual_seed(7), dtype=torch.float64)
        virtual = [a * x[i] + (1 - a) * x[j] for a, (i, j) in zip(share, pairs, strict=True)]
        return naive_recall_surrogate(
            torch.stack([*x, *virtual]), [*labels, *(labels[i] for i, _ in pairs)], (1, 4), 1.0, 0.2
        )

    loss = RecallSurrogate(Sphere(4), at=(1, 4), temperature=0.2, mixup=True)

    def mixed(x):
        torch.manual_seed(7)
        return loss(x, labels)

    assert len(pairs) == 11 and loss.training
    assert_equals(mixed, with_virtual, x)
    loss.eval()
    torch.testing.assert_close(loss(x, labels), naive_recall_surrogate(x, labels, (1, 4), 1.0, 0.2))


def test_an_empty_memory_changes_nothing_in_mixup(pair_batch):
    """Its columns are in no pair, and the virtual columns come after them."""
    x, labels = pair_batch
    plain = RecallSurrogate(Sphere(4), temperature=0.2, mixup=True)
    values = []
    for loss in (plain, CrossBatchMemory(Sphere(4), loss=plain, size=5)):
        torch.manual_seed(7)
        values.append(loss(x, labels))
    torch.testing.assert_close(*values)
