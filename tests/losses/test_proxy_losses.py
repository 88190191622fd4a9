"""Losses over proxies: loops straight from the papers, and pytorch-metric-learning with the same proxies."""

from math import degrees

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses as peers
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.losses import MPA, ArcFace, CosFace, NormSoftmax, ProxyAnchor, ProxyNCA, SoftTriple
from dmlkit.manifolds import Sphere
from dmlkit.recipe.file import parse_recipe
from tests.losses.proxies.test_margins import naive as margin_softmax

SPHERE = Sphere(5)


def proxy_nca(x: Tensor, labels: Tensor, proxies: Tensor, scale: float, positive: bool, squared: bool) -> Tensor:
    """Movshovitz-Attias et al., eq. 4, with a scale."""
    total = torch.zeros((), dtype=x.dtype)
    for i in range(len(x)):
        denominator = torch.zeros((), dtype=x.dtype)
        for c in range(len(proxies)):
            similarity = -(x[i] - proxies[c]).square().sum() if squared else x[i] @ proxies[c]
            if c == labels[i]:
                numerator = torch.exp(scale * similarity)
            if positive or c != labels[i]:
                denominator = denominator + torch.exp(scale * similarity)
        total = total - torch.log(numerator / denominator)
    return total / len(x)


def proxy_anchor(x: Tensor, labels: Tensor, proxies: Tensor, alpha: float, delta: float) -> Tensor:
    """Kim et al., eq. 4, term by term."""
    pull = push = torch.zeros((), dtype=x.dtype)
    for c in range(len(proxies)):
        own = others = torch.zeros((), dtype=x.dtype)
        for i in range(len(x)):
            s = x[i] @ proxies[c]
            if labels[i] == c:
                own = own + torch.exp(-alpha * (s - delta))
            else:
                others = others + torch.exp(alpha * (s + delta))
        pull = pull + torch.log(1 + own)
        push = push + torch.log(1 + others)
    return pull / len(set(labels.tolist())) + push / len(proxies)


def spread(centers: Tensor) -> Tensor:
    """The distances of the centers of each class, of both regularizers below."""
    classes, per_class = centers.shape[:2]
    total = torch.zeros((), dtype=centers.dtype)
    for c in range(classes):
        for s in range(per_class):
            for t in range(s + 1, per_class):
                distance = torch.sqrt(2 - 2 * centers[c, s] @ centers[c, t])
                total = total + distance / (classes * per_class * (per_class - 1))
    return total


def pooled(kind: str, s: list[Tensor], gamma: float = 0.1) -> Tensor:
    """Saeki et al., eq. 1, and the two alternatives of section 3.2."""
    if kind == "max":
        return max(s, key=lambda s_k: s_k.item())
    if kind == "mean":
        return sum(s) / len(s)
    total = sum(torch.exp(s_k / gamma) for s_k in s)
    return sum(torch.exp(s_k / gamma) / total * s_k for s_k in s)


def mpa(x: Tensor, labels: Tensor, proxies: Tensor, kind: str, _: int) -> Tensor:
    """Eq. 6, 3 and 7."""
    loss = torch.zeros((), dtype=x.dtype)
    for c in range(len(proxies)):
        own = others = torch.zeros((), dtype=x.dtype)
        for i in range(len(x)):
            s = pooled(kind, [x[i] @ proxy for proxy in proxies[c]])
            if labels[i] == c:
                own = own + torch.exp(-32.0 * (s - 0.1))
            else:
                others = others + torch.exp(32.0 * (s + 0.1))
        loss = loss + torch.log(1 + own) / len(set(labels.tolist())) + torch.log(1 + others) / len(proxies)
    return loss + 0.2 * spread(proxies)


def soft_triple(x: Tensor, labels: Tensor, centers: Tensor, tau: float, _: int) -> Tensor:
    """Saeki et al., eq. 1-4, with the mean over the batch of Qian et al., eq. 10."""
    loss = torch.zeros((), dtype=x.dtype)
    for i, label in enumerate(labels.tolist()):
        similarity = [pooled("softmax", [x[i] @ center for center in own]) for own in centers]
        own = torch.exp(20.0 * (similarity[label] - 0.01))
        others = sum(torch.exp(20.0 * s) for c, s in enumerate(similarity) if c != label)
        loss = loss - torch.log(own / (own + others)) / len(x)
    return loss + tau * spread(centers)


def of_proxy_nca(positive: bool, squared: bool, **options) -> ProxyNCA:
    sphere = Sphere(5, similarity="negative_squared_distance" if squared else "cosine")
    return ProxyNCA(sphere, 6, scale=5.0, positive_in_denominator=positive, **options)


def rows(margin: float) -> list[float]:
    return [margin] * 9


# how a loss is built, the equation, and the options of both
EQUATIONS = {
    "norm_softmax": (
        lambda tau, **options: NormSoftmax(SPHERE, 6, temperature=tau, **options),
        lambda x, y, p, tau: margin_softmax(x, y, p, rows(0.0), kind="cos", scale=1 / tau),
        [(0.3,)],
    ),
    "cosface": (
        lambda scale, margin, **options: CosFace(SPHERE, 6, scale=scale, margin=margin, **options),
        lambda x, y, p, scale, margin: margin_softmax(x, y, p, rows(margin), kind="cos", scale=scale),
        [(3.0, 0.2)],
    ),
    "arcface": (
        lambda scale, margin, centers, **options: ArcFace(
            SPHERE, 6, scale=scale, margin=margin, centers_per_class=centers, **options
        ),
        lambda x, y, p, scale, margin, _: margin_softmax(x, y, p, rows(margin), kind="arc", scale=scale),
        [(64.0, 0.5, 3), (3.0, 2.0, 1)],
    ),
    "proxy_anchor": (
        lambda alpha, delta, **options: ProxyAnchor(SPHERE, 6, scale=alpha, margin=delta, **options),
        proxy_anchor,
        [(4.0, 0.5)],
    ),
    "proxy_nca": (  # 1 - |x - p|^2 / 2 to the loss: the paper's has half the scale
        of_proxy_nca,
        lambda x, y, p, positive, squared: proxy_nca(x, y, p, 2.5 if squared else 5.0, positive, squared),
        [(True, True), (False, False)],
    ),
    "mpa": (
        lambda kind, each, **options: MPA(SPHERE, 6, proxies_per_class=each, class_similarity=kind, **options),
        mpa,
        [("softmax", 4), ("max", 2), ("mean", 1)],
    ),
    "soft_triple": (
        lambda tau, each, **options: SoftTriple(
            SPHERE, 6, centers_per_class=each, regularizer_weight=tau, scale=20.0, gamma=0.1, margin=0.01, **options
        ),
        soft_triple,
        [(0.0, 2), (0.2, 1), (1.0, 4)],
    ),
}


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize(
    ("name", "values"), [(name, values) for name, (*_, every) in EQUATIONS.items() for values in every]
)
def test_equation(agree, name: str, values: tuple, chunk_size: int | None):
    build, naive, _ = EQUATIONS[name]
    agree(build(*values, chunk_size=chunk_size).double(), lambda x, y, p: naive(x, y, p, *values))


# a loss, its peer, the peer's proxies, and how ours become theirs
PEERS = {
    "norm_softmax": (lambda: NormSoftmax(SPHERE, 6), lambda: peers.NormalizedSoftmaxLoss(6, 5), "W", "T"),
    "cosface": (lambda: CosFace(SPHERE, 6), lambda: peers.CosFaceLoss(6, 5), "W", "T"),
    "arcface": (
        lambda: ArcFace(SPHERE, 6, margin=0.5),
        lambda: peers.ArcFaceLoss(6, 5, margin=degrees(0.5)),
        *("W", "T"),
    ),
    "sub-centers": (
        lambda: ArcFace(SPHERE, 6, margin=0.5, centers_per_class=3),
        lambda: peers.SubCenterArcFaceLoss(num_classes=6, embedding_size=5, margin=degrees(0.5), sub_centers=3),
        *("W", "T"),
    ),
    # on squared distances with half the scale of cosines
    "proxy_nca": (
        lambda: ProxyNCA(SPHERE, 6, scale=18.0),
        lambda: peers.ProxyNCALoss(6, 5, softmax_scale=9),
        "proxies",
        "",
    ),
    "soft_triple": (
        lambda: SoftTriple(SPHERE, 6, centers_per_class=3, regularizer_weight=0.0),
        lambda: peers.SoftTripleLoss(6, 5, centers_per_class=3),
        *("fc", "T"),
    ),
    "proxy_anchor": (lambda: ProxyAnchor(SPHERE, 6), lambda: peers.ProxyAnchorLoss(6, 5), "proxies", ""),
}


@pytest.mark.parametrize("name", PEERS)
def test_peer(agree_with_peer, name: str):
    build, build_peer, weight, layout = PEERS[name]
    peer = build_peer().double()

    def as_theirs(proxies: Tensor) -> Tensor:
        flat = proxies.flatten(0, -2)
        return flat.T if layout else flat

    agree_with_peer(build().double(), peer, getattr(peer, weight), as_theirs)


@pytest.mark.parametrize("cosine", [1.0, -1.0])
def test_the_gradient_of_arcface_is_finite_on_the_proxy_and_opposite_to_it(cosine: float):
    loss = ArcFace(Sphere(2), 2)
    loss.proxies.data.copy_(torch.eye(2))
    points = torch.tensor([[cosine, 0.0]], requires_grad=True)
    loss(points, torch.tensor([0])).backward()
    assert points.grad is not None and points.grad.isfinite().all()


def test_proxy_nca_over_negatives_only_needs_two_classes():
    with pytest.raises(ValueError, match="positive_in_denominator=False needs at least 2 classes, got 1"):
        ProxyNCA(Sphere(2), 1, positive_in_denominator=False)
    assert ProxyNCA(Sphere(2), 1)(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).item() == 0


def test_frozen_parts_get_no_gradient_and_change_no_other():
    loss = ProxyAnchor(Sphere(3), 4, chunk_size=2)
    points, labels = loss.manifold.from_features(torch.randn(5, 3)), torch.arange(5) % 4
    learned = points.clone().requires_grad_()
    expected = torch.autograd.grad(loss(learned, labels), (learned, loss.proxies))
    (gradient,) = torch.autograd.grad(loss(points, labels), loss.proxies)
    torch.testing.assert_close(gradient, expected[1])
    loss.proxies.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(loss(learned, labels), learned)[0], expected[0])


def test_embeddings_of_another_dtype_are_refused():
    loss = ProxyAnchor(Sphere(3), 4)
    message = r"^ProxyAnchor: .* in torch.float64, but .* torch.float32; convert the loss: loss.to\(torch.float64\)$"
    with pytest.raises(ValueError, match=message):
        loss(torch.eye(3, dtype=torch.float64), torch.arange(3))
    message = r"^ProxyAnchor: .* in torch.float32, but .* torch.float16; convert the loss: loss.to\(torch.float32\)$"
    with pytest.raises(ValueError, match=message):
        loss.half()(torch.eye(3, dtype=torch.float16), torch.arange(3))


def test_arrays_and_lists_are_no_tensors():
    loss = ProxyAnchor(Sphere(3), 4)
    for points, labels, message in (
        (torch.eye(3), np.arange(3), "labels as a tensor, got ndarray"),
        (torch.eye(3), [0, 1, 2], "labels as a tensor, got list"),
        (np.eye(3, dtype=np.float32), torch.arange(3), "embeddings as a tensor, got ndarray"),
    ):
        with pytest.raises(TypeError, match=f"^ProxyAnchor: expected {message}; use torch.as_tensor$"):
            loss(points, labels)


@pytest.mark.parametrize(
    "loss",
    [
        "arcface",
        "cosface",
        "grouplet",
        "mpa",
        "norm_softmax",
        "proxy_anchor",
        "proxy_gml",
        "proxy_isa",
        "proxy_nca",
        "soft_triple",
    ],
)
def test_the_norm_of_points_is_refused(loss: str):
    text = "dataset: {name: glyphs}\nmanifold: {name: sphere, proxies: points}\noptimizer: {name: riemannian_adam}\n"
    with pytest.raises(UserError, match=r"manifold.proxies.*points.*loss.proxy_norm is the norm of features"):
        parse_recipe(f"{text}loss: {{name: {loss}, proxy_norm: 0.4}}\n", "r.yaml")
