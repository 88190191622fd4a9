import pytest
import torch

from dmlkit.losses import CrossBatchMemory, RecallSurrogate
from dmlkit.manifolds import Sphere


def naive(x, labels, at, tau_1, tau_2):
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


@pytest.mark.parametrize(
    ("at", "tau_1", "tau_2"), [((1, 2, 4, 8, 16), 1.0, 0.01), ((1,), 0.3, 0.2), ((2, 3), 9.0, 0.1)]
)
def test_equals_the_triple_loop(pair_batch, assert_equals, at, tau_1, tau_2):
    x, labels = pair_batch
    loss = RecallSurrogate(Sphere(4), at=at, rank_temperature=tau_1, temperature=tau_2)
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, labels, at, tau_1, tau_2), x)


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
        return naive(torch.stack([*x, *virtual]), [*labels, *(labels[i] for i, _ in pairs)], (1, 4), 1.0, 0.2)

    loss = RecallSurrogate(Sphere(4), at=(1, 4), temperature=0.2, mixup=True)

    def mixed(x):
        torch.manual_seed(7)
        return loss(x, labels)

    assert len(pairs) == 11 and loss.training
    assert_equals(mixed, with_virtual, x)
    loss.eval()
    torch.testing.assert_close(loss(x, labels), naive(x, labels, (1, 4), 1.0, 0.2))


def test_an_empty_memory_changes_nothing_in_mixup(pair_batch):
    """Its columns are in no pair, and the virtual columns come after them."""
    x, labels = pair_batch
    plain = RecallSurrogate(Sphere(4), temperature=0.2, mixup=True)
    values = []
    for loss in (plain, CrossBatchMemory(Sphere(4), loss=plain, size=5)):
        torch.manual_seed(7)
        values.append(loss(x, labels))
    torch.testing.assert_close(*values)
