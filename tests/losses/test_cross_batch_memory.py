import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from pytorch_metric_learning.losses import ContrastiveLoss
from pytorch_metric_learning.losses import CrossBatchMemory as PeerMemory
from torch.nn.functional import normalize

from dmlkit.losses import Circle, Contrastive, CrossBatchMemory, NPair, ProxyAnchor
from dmlkit.losses.base import LossConfig
from dmlkit.losses.pair_loss import PairLoss, PairLossConfig, Pairs, make_pairs
from dmlkit.manifolds import Lorentz, Poincare, Product, Sphere
from dmlkit.manifolds.hyperbolic import Hyperbolic
from tests.losses.conftest import bend, value_and_gradient

SPHERE = Sphere(4)
OVER_PAIRS = sorted(name for name, variant in LossConfig.variants.items() if issubclass(variant, PairLossConfig))


def batches(count, size=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            normalize(torch.randn(size, 4, dtype=torch.float64, generator=generator), dim=1),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", OVER_PAIRS)
def test_equals_the_loss_over_batch_and_memory(name):
    """Five batches of six into a memory of sixteen: it fills up, wraps around and forgets the oldest."""
    inner = LossConfig.variants[name]().build(SPHERE, 3).double()
    loss = CrossBatchMemory(SPHERE, loss=inner, size=16).double()
    past, past_labels = torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
    for x, labels in batches(5):

        def over_all(x, labels=labels, past=past, past_labels=past_labels):
            columns, column_labels = torch.cat([x, past]), torch.cat([labels, past_labels])
            alike = labels[:, None] == column_labels
            positive = torch.tensor(
                [[bool(alike[i, j]) and i != j for j in range(len(columns))] for i in range(len(x))]
            )
            return inner.compute_pairs(Pairs(x, columns, labels, positive, ~alike))

        if name != "margin":  # draws its negatives, and the order of the columns is another here
            torch.testing.assert_close(
                value_and_gradient(lambda x, labels=labels: loss(x, labels), x), value_and_gradient(over_all, x)
            )
        else:
            loss(x, labels)
        past, past_labels = torch.cat([past, x])[-16:], torch.cat([past_labels, labels])[-16:]
    assert sorted(map(tuple, loss.memory.tolist())) == sorted(map(tuple, past.tolist()))


LEARNED = Poincare.Config(learnable_curvature=True), Lorentz.Config(learnable_curvature=True)


@pytest.mark.parametrize(
    "config",
    [*LEARNED, Product.Config(factors=(*LEARNED, Sphere.Config()), widths=(1, 1, 2))],
    ids=["ball", "sheet", "product"],
)
@pytest.mark.parametrize("curvature", [-0.3, -4.0, -50.0])
def test_a_memory_follows_a_learned_curvature(config, curvature):
    """As the ball shrinks, points of earlier batches lie outside; their features are those of points of the new one."""
    space = config.build(4).double()
    loss = CrossBatchMemory(space, loss=Contrastive(space), size=16).double()
    (past, past_labels), (raw, labels) = batches(2)
    loss(space.from_features(2.2 * past), past_labels)
    for part in space.modules():
        if isinstance(part, Hyperbolic):
            bend(part, curvature)

    def value_and_gradients(function):
        features = raw.clone().requires_grad_()
        value = function(space.from_features(features))
        learned = [parameter for parameter in space.parameters() if parameter.requires_grad]
        return [value, *torch.autograd.grad(value, [features, *learned])]

    def recomputed(x):
        columns = torch.cat([x, space.from_features(2.2 * past)])
        return loss.loss.compute_pairs(make_pairs(x, labels, columns, torch.cat([labels, past_labels])))

    found = value_and_gradients(lambda x: loss(x, labels))
    torch.testing.assert_close(found, value_and_gradients(recomputed), rtol=1e-5, atol=1e-7)
    assert all(tensor.isfinite().all() for tensor in found)


def test_value_equals_pytorch_metric_learning():
    ours = CrossBatchMemory(SPHERE, loss=Contrastive(SPHERE, negative_margin=1.1, squared=False), size=64).double()
    peer = PeerMemory(ContrastiveLoss(neg_margin=1.1), 4, memory_size=64)
    for x, labels in batches(4):
        torch.testing.assert_close(ours(x, labels), peer(x, labels), rtol=1e-6, atol=1e-9)


def test_rests_before_its_epoch_and_in_evaluation():
    inner = Circle(SPHERE)
    loss = CrossBatchMemory(SPHERE, loss=inner, size=8, start_epoch=1).double()
    (first, second) = batches(2)
    loss.set_epoch(0)
    assert torch.equal(loss(*first), inner(*first))
    loss.set_epoch(1)
    loss.eval()
    loss(*first)
    assert (loss.memory_labels == -1).all()
    loss.train()
    loss(*first)
    assert not torch.equal(loss(*second), inner(*second))


def test_batch_larger_than_the_memory_leaves_its_last_embeddings():
    loss = CrossBatchMemory(SPHERE, loss=NPair(SPHERE), size=4).double()
    ((x, labels),) = batches(1)
    loss(x, labels)
    assert sorted(loss.memory.tolist()) == sorted(x[-4:].tolist())


def test_remembered_labels_of_a_gone_class_are_negatives_not_holes():
    pairs = make_pairs(torch.zeros(1, 4), torch.tensor([0]), torch.zeros(3, 4), torch.tensor([0, 7, -1]))
    assert pairs.negative.tolist() == [[False, True, False]]


@pytest.mark.filterwarnings("ignore:ProxyGML")  # k < N at a few classes
def test_configuration_and_class_agree_on_what_compares_pairs():
    for name, variant in LossConfig.variants.items():
        if name not in ("cross_batch_memory", "per_factor"):  # a loss of them needs another loss, or another space
            assert isinstance(variant().build(SPHERE, 3), PairLoss) == issubclass(variant, PairLossConfig), name


def test_a_loss_without_pairs_is_refused_by_name():
    with pytest.raises(ValueError, match=r"CrossBatchMemory: loss: got ProxyAnchor, expected PairLoss"):
        CrossBatchMemory(SPHERE, loss=ProxyAnchor(SPHERE, 3))
    config = TypeAdapter(CrossBatchMemory.Config)
    for name in ("proxy_anchor", "lifted_structure", "cross_batch_memory"):
        with pytest.raises(
            ValidationError, match=f"{name} does not compare pairs.*expected one of binomial_deviance, circle"
        ):
            config.validate_python({"loss": {"name": name}})


def test_nested_loss_and_miner_are_read_by_name():
    config = TypeAdapter(CrossBatchMemory.Config).validate_python(
        {"loss": {"name": "triplet", "margin": 0.3, "miner": {"name": "hard"}}, "size": 32}
    )
    loss = config.build(SPHERE, 3)
    assert type(loss.loss.miner).__name__ == "Hard"
    assert loss.loss.margin == 0.3
