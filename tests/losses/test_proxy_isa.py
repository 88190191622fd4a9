import warnings
from collections import Counter, deque
from math import exp, log

import pytest
import torch
from torch import Tensor

from dmlkit.losses import ProxyAnchor, ProxyISA, ProxyNCA
from dmlkit.losses.proxies.informative import ClassMemory, InformativeOptions, InformativeWeights, warn_if_constant
from dmlkit.manifolds import Lorentz, Poincare, Sphere
from tests.losses.conftest import bend

V, H, K, LAMBDA, TAU, ALPHA, DELTA = 20.0, 0.15, 0.9, 0.1, 1.5, 32.0, 0.1
CLASSES, DIM = 6, 5


class Naive:
    """Li et al., eq. 8-17 and algorithm 1, one pair at a time; the memory is a queue of (embedding, label)."""

    def __init__(self, positive: str, negative: str, size: int) -> None:
        self.positive, self.negative = positive, negative
        self.memory: deque[tuple[Tensor, int]] = deque(maxlen=size)
        self.seen: Counter[int] = Counter()
        self.average: dict[int, float] = {}  # of each class as it was last in a batch (algorithm 1)
        self.epoch = 0

    def thresholds(self, proxies: Tensor, c: int) -> tuple[float, float] | None:
        """Lower and upper end of the informative interval."""
        if c not in self.average:
            return None
        learned = H * self.average[c]
        v = 1 / (1 + log(1 + self.effective(c)))
        return learned - ((1 + K * (1 - learned)) * v + LAMBDA), learned

    def effective(self, c: int) -> float:
        b = (V - 1) / V
        return (1 - b ** self.seen[c]) / (1 - b)

    def positive_weight(self, s: float, c: int, proxies: Tensor) -> float:
        interval = self.thresholds(proxies, c)
        if self.epoch < 2 or self.positive == "none" or interval is None:
            return 1.0
        e = self.effective(c)
        v = 1 / (1 + log(1 + e))
        sigma = 1 + (1 + exp(-TAU)) * (v - 1) / (1 + exp(V - e - TAU))
        penalty = {"1/E": 1 / max(1, e), "v": v, "sigma": sigma}[self.positive]
        return 1 + penalty if interval[0] <= s <= interval[1] else penalty

    def negative_weight(self, s: float, c: int, proxies: Tensor) -> float:
        interval = self.thresholds(proxies, c)
        if self.negative == "none" or interval is None or s >= interval[0]:
            return 1.0
        return 1 / max(1, self.effective(c))

    def loss(self, x: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        pull = push = torch.zeros((), dtype=x.dtype)
        pull_total = push_total = 0.0
        for c in range(CLASSES):
            own = others = torch.zeros((), dtype=x.dtype)
            own_weights, other_weights = [], []
            for i in range(len(x)):
                s = x[i] @ proxies[c]
                if labels[i] == c:
                    own_weights.append(self.positive_weight(s.item(), c, proxies))
                    own = own + torch.exp(own_weights[-1] * ALPHA * (DELTA - s))
                else:
                    other_weights.append(self.negative_weight(s.item(), c, proxies))
                    others = others + torch.exp(other_weights[-1] * ALPHA * (DELTA + s))
            pull, push = pull + torch.log(1 + own), push + torch.log(1 + others)
            pull_total += sum(own_weights) / len(own_weights) if own_weights else 0
            push_total += sum(other_weights) / len(other_weights) if other_weights else 1
        value = pull / pull_total + push / push_total
        self.remember(x.detach(), labels, proxies.detach())
        return value

    def remember(self, x: Tensor, labels: Tensor, proxies: Tensor) -> None:
        if self.epoch < 1:
            return
        intervals = {c: self.thresholds(proxies, c) for c in range(CLASSES)}
        for i, c in enumerate(labels.tolist()):
            interval = intervals[c]
            outlier = self.epoch >= 2 and interval is not None and float(x[i] @ proxies[c]) < interval[0]
            if not outlier:
                self.memory.append((x[i], c))
            self.seen[c] += 1
        for c in labels.tolist():
            stored = [float(x @ proxies[c]) for x, y in self.memory if y == c]
            if stored:
                self.average[c] = sum(stored) / len(stored)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def a_batch(seed: int, proxies: Tensor, size: int = 9) -> tuple[Tensor, Tensor]:
    """Features near their proxies, with some outliers; no image of class 2, and of the last one none before epoch 2."""
    generator = torch.Generator().manual_seed(seed)
    present = torch.tensor([0, 1, 3, 4, 5] if seed >= 8 else [0, 1, 3, 4])
    labels = present[torch.randint(0, len(present), (size,), generator=generator)]
    noise = torch.randn(size, DIM, generator=generator, dtype=torch.float64)
    return (unit(proxies.detach())[labels] * (seed % 3) + noise).requires_grad_(), labels


@pytest.mark.parametrize(
    ("positive", "negative", "size", "chunk_size"),
    [
        ("none", "none", 1024, None),
        ("none", "1/E", 7, 4),
        ("1/E", "1/E", 1024, None),
        ("v", "1/E", 7, 4),
        *(("sigma", "1/E", *sizes) for sizes in ((1024, None), (7, 4))),
    ],
)
def test_the_columns_of_table_3_over_a_training_run(positive: str, negative: str, size: int, chunk_size: int | None):
    torch.manual_seed(0)
    loss = ProxyISA(
        Sphere(DIM),
        CLASSES,
        volume=V,
        positive_penalty=positive,
        negative_penalty=negative,
        memory_size=size,
        chunk_size=chunk_size,
    ).double()
    naive = Naive(positive, negative, size)
    weighted = kept = 0
    for seed in range(16):
        loss.set_epoch(seed // 4)
        naive.epoch = seed // 4
        features, labels = a_batch(seed, loss.proxies)
        inputs = (features, loss.proxies)
        expected = naive.loss(unit(features), labels, unit(loss.proxies))
        value = loss(loss.manifold.from_features(features), labels)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
        for gradient, other in zip(
            torch.autograd.grad(value, inputs), torch.autograd.grad(expected, inputs), strict=True
        ):
            torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-10)
        kept += len(naive.average.keys() - {y for _, y in naive.memory})
        plain = ProxyAnchor(Sphere(DIM), CLASSES).double()
        plain.load_state_dict({"proxies": loss.proxies})
        weighted += not torch.isclose(plain(unit(features), labels), value, rtol=1e-9)
        loss.proxies.data.sub_(0.05 * torch.randn(CLASSES, DIM, dtype=torch.float64))
    assert (weighted == 0) == (positive == negative == "none")  # and the run met informative pairs and outliers
    assert (kept > 0) == (size == 7)  # thresholds of classes that had left the memory
    assert loss.informative.memory.seen.tolist() == [naive.seen[c] for c in range(CLASSES)]


@pytest.mark.parametrize("kind", [Poincare, Lorentz])
def test_the_memory_follows_a_learned_curvature(kind: type[Poincare | Lorentz]):
    torch.manual_seed(0)
    space = kind(DIM, learnable_curvature=True)
    loss = ProxyISA(space, CLASSES, memory_size=8)
    loss.set_epoch(1)
    past, labels = 2.2 * unit(torch.randn(4, DIM)), torch.tensor([0, 0, 1, 3])
    loss(space.from_features(past), labels)
    bend(space, -8.0)
    raw = torch.randn(1, DIM)
    loss(space.from_features(raw), torch.tensor([0]))
    points = space.from_features(torch.cat([past[:2], raw]))
    expected = space.relative_similarity(points, space.proxy_points(loss.proxies[:1])).mean()
    torch.testing.assert_close(loss.informative.memory.averages[0], expected, rtol=1e-4, atol=1e-4)


def test_a_batch_of_one_class_has_no_images_of_others():
    torch.manual_seed(0)
    loss, naive = ProxyISA(Sphere(DIM), CLASSES, volume=V, memory_size=1024).double(), Naive("sigma", "1/E", 1024)
    for epoch in (1, 2, 3):
        loss.set_epoch(epoch)
        naive.epoch = epoch
        features, _ = a_batch(epoch, loss.proxies)
        labels = torch.zeros(len(features), dtype=torch.int64)
        expected = naive.loss(unit(features), labels, unit(loss.proxies))
        value = loss(loss.manifold.from_features(features), labels)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def test_the_weights_on_proxy_nca():
    torch.manual_seed(0)
    options = InformativeOptions.Config(volume=V, memory_size=7)
    loss = ProxyNCA.Config(scale=5.0, informative=options).build(Sphere(DIM), CLASSES).double()
    plain = ProxyNCA(Sphere(DIM), CLASSES, scale=5.0).double()
    naive, weighted = Naive("sigma", "1/E", 7), 0
    for seed in range(16):
        loss.set_epoch(seed // 4)
        naive.epoch = seed // 4
        features, labels = a_batch(seed, loss.proxies)
        x, proxies = unit(features), unit(loss.proxies)
        terms: list[Tensor] = []
        for i, y in enumerate(labels.tolist()):
            exponents = [5 * (x[i] @ proxies[c]) for c in range(CLASSES)]
            weights = [
                naive.positive_weight(s.item() / 5, c, proxies)
                if c == y
                else naive.negative_weight(s.item() / 5, c, proxies)
                for c, s in enumerate(exponents)
            ]
            terms.append(torch.stack([w * s for w, s in zip(weights, exponents, strict=True)]).log_softmax(0)[y])
        expected = -torch.stack(terms).mean()
        naive.remember(x.detach(), labels, proxies.detach())
        value = loss(loss.manifold.from_features(features), labels)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
        inputs = (features, loss.proxies)
        gradients = torch.autograd.grad(value, inputs)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs), rtol=1e-6, atol=1e-10)
        plain.proxies.data.copy_(loss.proxies)
        weighted += not torch.isclose(plain(x, labels), value, rtol=1e-9)
        loss.proxies.data.sub_(0.05 * torch.randn(CLASSES, DIM, dtype=torch.float64))
    assert weighted > 4


def test_the_memory_may_grow_with_the_classes():
    sizes = [ProxyISA(Sphere(2), classes, memory_size=10, memory_per_class=1.5) for classes in (2, 10, 101)]
    assert [len(loss.informative.memory.labels) for loss in sizes] == [10, 15, 152]


def test_evaluation_leaves_the_memory_alone():
    loss = ProxyISA(Sphere(3), 2)
    loss.set_epoch(2)
    loss.eval()
    loss(torch.eye(3), torch.tensor([0, 1, 1]))
    assert loss.informative.memory.seen.tolist() == [0, 0] and (loss.informative.memory.labels == -1).all()


def test_the_effective_number_of_the_paper():
    numbers = ProxyISA(Sphere(2), 2).informative.effective_number(torch.tensor([0.0, 1.0, 2.0, 1e6]))
    torch.testing.assert_close(numbers, torch.tensor([0.0, 1.0, 1.99, 100.0]))


@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_the_memory_is_a_queue(size: int):
    memory, queue = ClassMemory(size, 1, 3), deque(maxlen=size)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        count = int(torch.randint(1, 7, (), generator=generator))
        points, labels = torch.randn(count, 1, generator=generator), torch.randint(0, 3, (count,), generator=generator)
        clean = torch.rand(count, generator=generator) < 0.6
        memory.remember(points, labels, clean)
        queue.extend(zip(points[clean, 0].tolist(), labels[clean].tolist(), strict=True))
        filled = memory.labels >= 0
        assert sorted(zip(memory.points[filled, 0].tolist(), memory.labels[filled].tolist(), strict=True)) == sorted(
            queue
        )


def test_volume_1_has_constant_weights_and_warns():
    """E = 1 for every n, so v, sigma and 1/E are those of the first sample for ever."""
    warning = "loss.volume: 1 keeps the weights of Proxy-ISA constant over time.*use a value above 1"
    warn_if_constant.cache_clear()
    with pytest.warns(UserWarning, match=warning) as warned:
        options = InformativeOptions.Config(volume=1).model_dump()
        weights = InformativeWeights(3, 2, **options)
    assert len(warned) == 1  # not again for the loss of a recipe
    warn_if_constant.cache_clear()
    with pytest.warns(UserWarning, match=warning):
        InformativeWeights(3, 2, volume=1)
    seen = torch.tensor([1.0, 2.0, 100.0])
    assert weights.effective_number(seen).tolist() == [1, 1, 1]
    with warnings.catch_warnings(action="error"):
        weights = InformativeWeights(3, 2, **{**options, "volume": 2.0})
    assert weights.effective_number(seen).tolist() == pytest.approx(
        [sum(0.5**i for i in range(n)) for n in (1, 2, 100)]
    )
