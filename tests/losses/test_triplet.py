import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import BatchHardMiner

from dmlkit.losses import Triplet, triplet
from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.miners import All, Hard, SemiHard
from tests.losses.conftest import mined

MINERS = {"all": All, "hard": Hard, "semi_hard": SemiHard}


def naive(x, triplets, margin, squared, smooth):
    terms = []
    for a, p, n in triplets:
        near, far = ((x[a] - x[other]).square().sum() for other in (p, n))
        violation = (near - far if squared else near.sqrt() - far.sqrt()) + margin
        if smooth:
            terms.append((1 + violation.exp()).log())
        elif violation > 0:
            terms.append(violation)
    return sum(terms) / len(terms)


@pytest.mark.parametrize(
    ("squared", "margin", "smooth"),
    [(True, 0.1, False), (False, 0.3, False), (True, 10.0, False), (False, 0.0, True), (True, 0.3, True)],
)
@pytest.mark.parametrize("mining", MINERS)
def test_equals_the_triple_loop(pair_batch, assert_equals, mining, squared, margin, smooth):
    x, labels = pair_batch
    miner = MINERS[mining]()
    triplets = mined(miner, x, labels)
    loss = Triplet(Sphere(4), margin=margin, squared=squared, smooth=smooth, miner=miner)
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, triplets, margin, squared, smooth), x)


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("mining", ["all", "hard"])
def test_equals_pytorch_metric_learning(pair_batch, assert_equals, mining, smooth):
    x, labels = pair_batch
    distance = LpDistance(normalize_embeddings=False, power=2)
    peer = TripletMarginLoss(0.2, smooth_loss=smooth, distance=distance)
    peer_miner = BatchHardMiner(distance=LpDistance(normalize_embeddings=False)) if mining == "hard" else None
    loss = Triplet(Euclidean(4), margin=0.2, smooth=smooth, miner=MINERS[mining]())

    def of_peer(x):
        return peer(x, labels, peer_miner(x.detach(), labels) if peer_miner else None)

    assert_equals(lambda x: loss(x, labels), of_peer, x, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 25, 150])  # 22 pairs of 12 columns: 22, 11 and 2 chunks
def test_smooth_chunks_change_nothing(pair_batch, assert_equals, monkeypatch, chunk):
    x, labels = pair_batch
    loss, triplets = Triplet(Sphere(4), smooth=True), mined(All(), x, labels)
    monkeypatch.setattr(triplet, "CHUNK", chunk)
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, triplets, 0.1, True, True), x)


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
