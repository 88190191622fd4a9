"""Losses over pairs: loops over single pairs straight from the papers, and the peers of pytorch-metric-learning."""

import pytest
import torch
from pytorch_metric_learning import losses as peers
from pytorch_metric_learning.distances import DotProductSimilarity, LpDistance, SNRDistance
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.regularizers import ZeroMeanRegularizer
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from dmlkit.losses import (
    BinomialDeviance,
    Circle,
    Contrastive,
    FastAP,
    LiftedStructure,
    MultiSimilarity,
    NPair,
    SigmoidPairs,
    SNRContrastive,
    SupCon,
)
from dmlkit.losses.pair_loss import Pairs
from dmlkit.manifolds import Euclidean, Sphere

SPHERE = Sphere(4)


def sup_con(x, labels, tau):
    rows, losses = range(len(x)), []
    for i in rows:
        positives = [p for p in rows if p != i and labels[p] == labels[i]]
        if positives:
            total = sum((x[i] @ x[a] / tau).exp() for a in rows if a != i)
            losses.append(-sum(((x[i] @ x[p] / tau).exp() / total).log() for p in positives) / len(positives))
    return sum(losses) / len(losses)


def circle(x, labels, m, gamma):
    terms = []
    rows = range(len(x))
    for i in rows:
        positives = [x[i] @ x[k] for k in rows if k != i and labels[k] == labels[i]]
        negatives = [x[i] @ x[k] for k in rows if labels[k] != labels[i]]
        if positives and negatives:
            push = sum((gamma * (s.detach() + m).relu() * (s - m)).exp() for s in negatives)
            pull = sum((-gamma * (1 + m - s.detach()).relu() * (s - (1 - m))).exp() for s in positives)
            terms.append((1 + push * pull).log())
    return sum(terms) / len(terms)


def binomial_deviance(x, labels, alpha, beta, eta_positive, eta_negative):
    """CGML's eq. 7, its sum split into the two averages of Yi et al."""
    sums, counts = {True: 0, False: 0}, {True: 0, False: 0}
    for i in range(len(x)):
        for j in range(len(x)):
            if i != j:
                s = bool(labels[i] == labels[j])
                cosine = x[i] @ x[j] / (x[i].norm() * x[j].norm())
                eta = eta_positive if s else eta_negative
                sums[s] += (1 + (-(2 * s - 1) * alpha * (cosine - beta) * eta).exp()).log()
                counts[s] += 1
    return sums[True] / counts[True] + sums[False] / counts[False]


def lifted_structure(x, labels, margin):
    terms = []
    rows = range(len(x))
    for i in rows:
        for j in range(i + 1, len(x)):
            if labels[i] == labels[j]:
                ends = [(end, k) for end in (i, j) for k in rows if labels[k] != labels[end]]
                total = sum((margin - (x[end] - x[k]).norm()).exp() for end, k in ends)
                terms.append((total.log() + (x[i] - x[j]).norm()).relu() ** 2)
    return sum(terms) / (2 * len(terms))


def multi_similarity(x, labels, alpha, beta, base, epsilon):
    total = 0
    rows = range(len(x))
    for i in rows:
        positives = [x[i] @ x[k] for k in rows if k != i and labels[k] == labels[i]]
        negatives = [x[i] @ x[k] for k in rows if labels[k] != labels[i]]
        if epsilon is not None:
            low, high = min(positives, default=torch.inf), max(negatives, default=-torch.inf)
            positives = [s for s in positives if s < high + epsilon]
            negatives = [s for s in negatives if s > low - epsilon]
        total += (1 + sum((-alpha * (s - base)).exp() for s in positives) + x.sum() * 0).log() / alpha
        total += (1 + sum((beta * (s - base)).exp() for s in negatives) + x.sum() * 0).log() / beta
    return total / len(x)


def n_pair(x, labels, scale):
    terms = []
    rows = range(len(x))
    for i in rows:
        for p in rows:
            if p != i and labels[p] == labels[i]:
                others = [(scale * (x[i] @ x[j] - x[i] @ x[p])).exp() for j in rows if labels[j] != labels[i]]
                terms.append((1 + sum(others)).log())
    return sum(terms) / len(terms)


def contrastive(x, labels, positive_margin, negative_margin, power):
    pull, push = [], []
    for i in range(len(x)):
        for j in range(len(x)):
            if i == j:
                continue
            distance = (x[i] - x[j]).norm()
            if labels[i] == labels[j] and distance > positive_margin:
                pull.append((distance - positive_margin) ** power)
            if labels[i] != labels[j] and distance < negative_margin:
                push.append((negative_margin - distance) ** power)
    return sum(pull) / max(1, len(pull)) + sum(push) / max(1, len(push))


def sigmoid_pairs(x, labels, t, b):
    total = 0
    for i in range(len(x)):
        for j in range(len(x)):
            if i != j:
                sign = 1 if labels[i] == labels[j] else -1
                total = total + (1 + (-sign * (t * (x[i] @ x[j]) + b)).exp()).log()
    return total / len(x)


def of_binomial(space, values):
    names = ("scale", "threshold", "positive_cost", "negative_cost")
    return BinomialDeviance(space, **dict(zip(names, values, strict=True)))


COSINE, DOT = Euclidean(4, similarity="cosine"), Euclidean(4, similarity="dot")
SETTINGS = [(2.0, 0.5, 1.0, 25.0), (3.0, -0.2, 2.0, 5.0)]  # of the binomial deviance
LOOPS = [  # loss, loop, its options, length of the points, how to compare
    *((SupCon(SPHERE, temperature=tau), sup_con, (tau,), 1, {}) for tau in (0.1, 1.0)),
    # no finite differences: the weights are constants for the gradient, and not for the value
    (Circle(SPHERE, margin=0.25, scale=4.0), circle, (0.25, 4.0), 1, {"finite_differences": False}),
    (of_binomial(SPHERE, SETTINGS[0]), binomial_deviance, SETTINGS[0], 1, {}),
    (of_binomial(COSINE, SETTINGS[1]), binomial_deviance, SETTINGS[1], 3, {}),
    *((LiftedStructure(SPHERE, margin=m), lifted_structure, (m,), 1, {}) for m in (0.2, 0.0)),
    *(
        (
            MultiSimilarity(SPHERE, positive_scale=a, negative_scale=b, threshold=base, mining_margin=epsilon),
            multi_similarity,
            (a, b, base, epsilon),
            1,
            {},
        )
        for epsilon, a, b, base in ((None, 2.0, 50.0, 0.5), (0.1, 5.0, 3.0, 1.0), (0.0, 2.0, 50.0, 0.5))
    ),
    # torch's softplus is linear above 20, which is off by e^-20 = 2e-9
    (NPair(SPHERE, scale=16.0), n_pair, (16.0,), 1, {"rtol": 1e-7}),
    (NPair(DOT), n_pair, (1.0,), 3, {"rtol": 1e-7}),
    *(
        (
            Contrastive(SPHERE, positive_margin=positive, negative_margin=negative, squared=power == 2),
            contrastive,
            (positive, negative, power),
            1,
            {},
        )
        for positive, negative, power in ((0, 1, 2), (0.9, 1.2, 1))
    ),
]


@pytest.mark.parametrize(
    ("loss", "loop", "options", "length", "how"),
    [pytest.param(*case, id=f"{case[1].__name__}-{case[2]}") for case in LOOPS],
)
def test_equals_the_loops(pair_batch, assert_equals, loss, loop, options, length, how):
    x, labels = pair_batch
    assert_equals(lambda x: loss(length * x, labels), lambda x: loop(length * x, labels, *options), x, **how)


@pytest.mark.parametrize(("t", "b"), [(10.0, -10.0), (2.0, 0.5)])
def test_pairs_by_a_learned_sigmoid_equal_the_double_loop(pair_batch, assert_equals, t, b):
    x, labels = pair_batch
    loss = SigmoidPairs(SPHERE, scale=t, bias=b).double()
    assert_equals(lambda x: loss(x, labels), lambda x: sigmoid_pairs(x, labels, loss.log_scale.detach().exp(), b), x)


FLAT = LpDistance(normalize_embeddings=False)
PEERS = [
    (SupCon(SPHERE, temperature=0.1), peers.SupConLoss(0.1), 1),
    (Circle(SPHERE), peers.CircleLoss(m=0.4, gamma=80), 1),
    (LiftedStructure(Euclidean(4), margin=0.5), peers.LiftedStructureLoss(neg_margin=0.5, distance=FLAT), 2),
    (MultiSimilarity(SPHERE, mining_margin=0.1), peers.MultiSimilarityLoss(2, 50, 0.5), 1),
    (MultiSimilarity(SPHERE, mining_margin=None), peers.MultiSimilarityLoss(2, 50, 0.5), 1),
    (
        Contrastive(Euclidean(4), positive_margin=0.5, negative_margin=1.3, squared=False),
        peers.ContrastiveLoss(0.5, 1.3, distance=FLAT),
        2,
    ),
    (
        SNRContrastive(Euclidean(4), positive_margin=0.2, negative_margin=1.5),
        peers.SignalToNoiseRatioContrastiveLoss(
            pos_margin=0.2, neg_margin=1.5, distance=SNRDistance(normalize_embeddings=False)
        ),
        3,
    ),
    (
        SNRContrastive(SPHERE, regularizer_weight=0.1),
        peers.SignalToNoiseRatioContrastiveLoss(embedding_regularizer=ZeroMeanRegularizer(), embedding_reg_weight=0.1),
        1,
    ),
]


@pytest.mark.parametrize(("loss", "peer", "length"), [pytest.param(*case, id=type(case[0]).__name__) for case in PEERS])
def test_equals_pytorch_metric_learning(pair_batch, assert_equals, loss, peer, length):
    x, labels = pair_batch
    mined = MultiSimilarityMiner(0.1) if getattr(loss, "mining_margin", None) else None
    assert_equals(
        lambda x: loss(length * x, labels),
        lambda x: peer(length * x, labels, mined and mined(x.detach(), labels)),
        x,
        finite_differences=not isinstance(loss, Circle),
        rtol=1e-6,
    )


@pytest.mark.parametrize("bins", [1, 10, 27])
def test_fast_ap_equals_that_of_pytorch_metric_learning(pair_batch, assert_equals, bins):
    x, labels = pair_batch
    assert_equals(
        lambda x: FastAP(SPHERE, bins=bins)(x, labels), lambda x: peers.FastAPLoss(bins)(x, labels), x, rtol=1e-6
    )


@pytest.mark.parametrize("length", [1e-4, 1e4])
def test_the_ratio_of_noise_to_signal_does_not_depend_on_the_length_of_points(pair_batch, length):
    x, labels = pair_batch
    loss = SNRContrastive(Euclidean(4))
    torch.testing.assert_close(loss(length * x, labels), loss(x, labels))


def test_one_feature_has_no_ratio_of_noise_to_signal():
    with pytest.raises(ValueError, match="one feature has no variance; expected at least 2 dimensions, got 1"):
        SNRContrastive(Euclidean(1))


def test_anchors_against_positives_equal_the_n_pairs_of_pytorch_metric_learning(assert_equals):
    """Sohn's form has one positive a class as columns; that is another set of pairs, not another loss."""
    x = torch.randn(8, 3, dtype=torch.float64)
    labels = torch.arange(8) // 2
    alike = torch.eye(4, dtype=torch.bool)
    loss = NPair(Euclidean(3, similarity="dot"))

    def ours(x):
        return loss.compute_pairs(Pairs(x[::2], x[1::2], labels[::2], alike, ~alike))

    peer = peers.NPairsLoss(distance=DotProductSimilarity(normalize_embeddings=False))
    assert_equals(ours, lambda x: peer(x, labels), x, rtol=1e-6)


def test_defaults_of_the_binomial_deviance_are_those_of_cgml():
    loss = BinomialDeviance(Sphere(2))
    assert (loss.scale, loss.threshold, loss.positive_cost, loss.negative_cost) == SETTINGS[0]


@pytest.mark.parametrize(
    ("loss", "points", "labels"),
    [
        (LiftedStructure(Euclidean(3)), torch.randn(5, 3), [0] * 5),  # one class has no negatives
        (Contrastive(Euclidean(1)), torch.tensor([[0.0], [0.0], [5.0]]), [0, 0, 1]),  # all pairs rest
    ],
    ids=["lifted_structure", "contrastive"],
)
def test_pairs_that_rest_give_zero_with_a_zero_gradient(loss, points, labels):
    x = points.clone().requires_grad_()
    value = loss(x, torch.tensor(labels))
    value.backward()
    assert value == 0
    assert x.grad.abs().max() == 0


def test_sigmoid_pairs_learn_scale_and_bias_by_the_gradient_of_a_logistic_regression(pair_batch):
    x, labels = pair_batch
    loss = SigmoidPairs(SPHERE, scale=3.0, bias=-1.0).double()
    scale, bias = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (3.0, -1.0))
    pairs = ~torch.eye(12, dtype=torch.bool)
    same = (labels[:, None] == labels)[pairs].double()
    expected = binary_cross_entropy_with_logits(scale * (x @ x.T)[pairs] + bias, same, reduction="sum") / 12
    of_scale, of_bias = torch.autograd.grad(expected, (scale, bias))
    value = loss(x, labels)
    of_log_scale, of_own_bias = torch.autograd.grad(value, (loss.log_scale, loss.bias))
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)  # log_scale started in float32
    torch.testing.assert_close((of_log_scale, of_own_bias), (3 * of_scale, of_bias), rtol=1e-6, atol=0)


def test_a_single_image_has_no_sigmoid_loss_and_one_class_has_one():
    loss = SigmoidPairs(SPHERE)
    points = normalize(torch.randn(5, 4), dim=1).requires_grad_()
    assert loss(points[:1], torch.tensor([0])).item() == 0
    (gradient,) = torch.autograd.grad(loss(points, torch.zeros(5, dtype=torch.int64)), points)
    assert gradient.abs().sum() > 0
