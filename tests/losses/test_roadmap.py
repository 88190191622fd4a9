import pytest
import torch
from torch.nn.functional import normalize

from dmlkit.losses import ROADMAP
from dmlkit.manifolds import Sphere


def step(t, tau, rho, delta):
    if t <= 0:
        return 1 / (1 + (-t / tau).exp())
    if t <= delta:
        return 1 / (1 + (-t / tau).exp()) + 0.5
    return rho * (t - delta) + 1 / (1 + torch.exp(torch.tensor(-delta / tau, dtype=t.dtype))) + 0.5


def naive(x, labels, tau, rho, delta, weight, alpha, beta):
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


@pytest.mark.parametrize(
    ("tau", "rho", "delta", "weight", "alpha", "beta"),
    [(0.01, 100.0, 0.05, 0.5, 0.9, 0.6), (0.2, 3.0, 0.4, 0.0, 0.9, 0.6), (0.2, 3.0, 0.4, 0.9, 0.3, 0.1)],
)
def test_equals_the_triple_loop(pair_batch, assert_equals, tau, rho, delta, weight, alpha, beta):
    x, labels = pair_batch
    loss = ROADMAP(
        Sphere(4),
        temperature=tau,
        slope=rho,
        sigmoid_end=delta,
        calibration_weight=weight,
        positive_threshold=alpha,
        negative_threshold=beta,
    )
    options = tau, rho, delta, weight, alpha, beta
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, labels, *options), x)


def test_bounds_the_average_precision():
    """Without calibration it is at least 1 - AP, which no sigmoid promises."""
    labels, above = torch.arange(30) // 3, 0
    loss = ROADMAP(Sphere(3), calibration_weight=0.0)
    for seed in range(5):
        x = normalize(torch.randn(30, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=1)
        precisions = []
        for q in range(30):
            order = [i for i in (x @ x[q]).argsort(descending=True).tolist() if i != q]
            hits = [place for place, i in enumerate(order, start=1) if labels[i] == labels[q]]
            precisions += [count / place for count, place in enumerate(hits, start=1)]
        exact = 1 - sum(precisions) / len(precisions)
        assert loss(x, labels) >= exact
        above += float(loss(x, labels)) - exact
    assert 0 < above / 5 < 0.5
