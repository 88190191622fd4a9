import pytest
import torch
from pytorch_metric_learning.losses import SmoothAPLoss
from torch.nn.functional import normalize

from dmlkit.losses import SmoothAP
from dmlkit.losses.pair_loss import Pairs
from dmlkit.manifolds import Sphere


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


@pytest.mark.parametrize("tau", [0.01, 0.2])
def test_equals_the_triple_loop(pair_batch, assert_equals, tau):
    x, labels = pair_batch
    loss = SmoothAP(Sphere(4), temperature=tau)
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, labels, tau), x)


def test_narrow_sigmoids_give_the_average_precision(pair_batch):
    x, labels = pair_batch
    losses = []
    for q in range(len(x)):
        order = [i for i in (x @ x[q]).argsort(descending=True).tolist() if i != q]
        hits = [place for place, i in enumerate(order, start=1) if labels[i] == labels[q]]
        if hits:
            losses.append(1 - sum(count / place for count, place in enumerate(hits, start=1)) / len(hits))
    value = SmoothAP(Sphere(4), temperature=1e-6)(x, labels)
    torch.testing.assert_close(value, torch.tensor(losses, dtype=torch.float64).mean())


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
