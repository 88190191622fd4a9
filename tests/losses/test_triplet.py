import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner

from dmlkit.losses import Triplet, triplet
from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.miners import All, Hard, SemiHard


def all_triplets(distance, labels):
    rows = range(len(labels))
    for a in rows:
        for p in rows:
            if p != a and labels[p] == labels[a]:
                yield from ((a, p, n) for n in rows if labels[n] != labels[a])


def hard_triplets(distance, labels):
    for a in range(len(labels)):
        mine = [t for t in all_triplets(distance, labels) if t[0] == a]
        if mine:
            p = max({t[1] for t in mine}, key=lambda p: distance[a, p])
            n = min({t[2] for t in mine}, key=lambda n: distance[a, n])
            yield a, p, n


def semi_hard_triplets(distance, labels):
    pairs = {t[:2] for t in all_triplets(distance, labels)}
    for a, p in pairs:
        beyond = [n for n in range(len(labels)) if labels[n] != labels[a] and distance[a, n] > distance[a, p]]
        if beyond:
            yield a, p, min(beyond, key=lambda n: distance[a, n])


MINERS = {"all": (All, all_triplets), "hard": (Hard, hard_triplets), "semi_hard": (SemiHard, semi_hard_triplets)}


def naive(x, labels, triplets, margin, squared, smooth):
    terms = []
    distance = torch.stack([torch.stack([(a - b).square().sum() for b in x]) for a in x])
    for a, p, n in triplets(distance.detach(), labels):
        near, far = distance[a, p], distance[a, n]
        violation = (near - far if squared else near.sqrt() - far.sqrt()) + margin
        if smooth:
            terms.append((1 + violation.exp()).log())
        elif violation > 0:
            terms.append(violation)
    return sum(terms) / len(terms)


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("squared", "margin"), [(True, 0.1), (False, 0.3), (True, 10.0), (True, 0.0)])
@pytest.mark.parametrize("mining", MINERS)
def test_equals_the_triple_loop(pair_batch, assert_equals, mining, squared, margin, smooth):
    x, labels = pair_batch
    miner, triplets = MINERS[mining]
    if mining == "semi_hard" and margin == 0 and not smooth:
        pytest.skip("semi-hard triplets violate no margin of 0")
    loss = Triplet(Sphere(4), margin=margin, squared=squared, smooth=smooth, miner=miner())
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, labels, triplets, margin, squared, smooth), x)


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("mining", ["all", "hard"])
def test_equals_pytorch_metric_learning(pair_batch, assert_equals, mining, smooth):
    x, labels = pair_batch
    distance = LpDistance(normalize_embeddings=False, power=2)
    peer = TripletMarginLoss(0.2, smooth_loss=smooth, distance=distance)
    peer_miner = BatchHardMiner(distance=LpDistance(normalize_embeddings=False)) if mining == "hard" else None
    loss = Triplet(Euclidean(4), margin=0.2, smooth=smooth, miner=MINERS[mining][0]())

    def of_peer(x):
        return peer(x, labels, peer_miner(x.detach(), labels) if peer_miner else None)

    assert_equals(lambda x: loss(x, labels), of_peer, x, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 25, 150])  # 22 pairs of 12 columns: 22, 11 and 2 chunks
def test_smooth_chunks_change_nothing(pair_batch, assert_equals, monkeypatch, chunk):
    x, labels = pair_batch
    loss = Triplet(Sphere(4), smooth=True)
    whole = loss(x, labels)
    monkeypatch.setattr(triplet, "CHUNK", chunk)
    torch.testing.assert_close(loss(x, labels), whole)
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, labels, all_triplets, 0.1, True, True), x)


def test_smooth_chunks_bound_the_memory():
    """Two classes of 128: a matrix of all 4 million triplets would take 33 MB."""
    x = torch.randn(256, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(256) % 2
    kept = {}

    def count(tensor):
        kept[tensor.data_ptr()] = tensor
        return tensor

    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        patch.setattr(triplet, "CHUNK", 2**16)
        Triplet(Euclidean(8), smooth=True)(x, labels)
    assert sum(tensor.numel() * tensor.element_size() for tensor in kept.values()) < 2**23


def test_no_violation_gives_zero_with_a_zero_gradient():
    x = torch.tensor([[0.0], [0.1], [9.0], [9.1]], requires_grad=True)
    value = Triplet(Euclidean(1))(x, torch.tensor([0, 0, 1, 1]))
    value.backward()
    assert value == 0
    assert x.grad.abs().max() == 0


def test_equal_embeddings_lose_exactly_the_margin():
    x = torch.ones(6, 3)
    assert Triplet(Euclidean(3), margin=0.25)(x, torch.arange(6) % 2) == 0.25
