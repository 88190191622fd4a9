from math import ceil

import pytest
import torch
from torch import Tensor, nn

from dmlkit.losses import ProxyGML
from dmlkit.manifolds import Euclidean, Sphere


def naive(
    x: Tensor, labels: Tensor, proxies: Tensor, *, k: int, scale: float, lam: float, positive: bool, masked: bool
) -> Tensor:
    """Zhu et al., eq. 2-12, with a positive mask of 1000 as in the authors' code."""
    classes, per_class = proxies.shape[:2]
    flat, owner = proxies.flatten(0, 1), [c for c in range(classes) for _ in range(per_class)]
    total = torch.zeros((), dtype=x.dtype)
    for i in range(len(x)):
        s = [x[i] @ p for p in flat]
        rank = [s_j.item() + 1000 * (positive and owner[j] == labels[i]) for j, s_j in enumerate(s)]
        kept = set(sorted(range(len(flat)), key=lambda j: -rank[j])[:k])
        z = [scale * sum((s[j] for j in kept if owner[j] == c), torch.zeros_like(total)) for c in range(classes)]
        mask = [float(not masked or any(owner[j] == c for j in kept)) for c in range(classes)]
        if mask[labels[i]]:
            denominator = sum(m * torch.exp(z_c) for m, z_c in zip(mask, z, strict=True))
            total = total - torch.log(torch.exp(z[labels[i]]) / denominator) / len(x)
    for j, p in enumerate(flat if lam else []):
        z = [sum(p @ q for q in proxies[c]) for c in range(classes)]
        probability = torch.exp(z[owner[j]]) / sum(torch.exp(z_c) for z_c in z)
        total = total - lam * torch.log(probability) / len(flat)
    return total


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("lam", "chunk_size"), [(0.0, 4), (0.3, None)])
def test_the_eight_rows_of_table_1(agree, positive: bool, masked: bool, lam: float, chunk_size: int | None):
    loss = ProxyGML(
        Sphere(5),
        6,
        proxies_per_class=3,
        ratio=0.4,
        regularizer_weight=lam,
        positive_mask=positive,
        mask_softmax=masked,
        chunk_size=chunk_size,
    ).double()
    agree(loss, lambda x, y, p: naive(x, y, p, k=ceil(0.4 * 18), scale=1.0, lam=lam, positive=positive, masked=masked))


@pytest.mark.parametrize(("ratio", "scale"), [(0.2, 20.0), (0.5, 1.0), (1.0, 20.0)])
def test_ratio_and_scale(agree, ratio: float, scale: float):
    loss = ProxyGML(Sphere(5), 6, proxies_per_class=3, ratio=ratio, scale=scale).double()
    agree(loss, lambda x, y, p: naive(x, y, p, k=ceil(ratio * 18), scale=scale, lam=0.3, positive=True, masked=True))


@pytest.mark.parametrize("manifold", [Sphere(4), Euclidean(4, similarity="dot"), Euclidean(4, similarity="cosine")])
def test_regularizer_is_its_dense_form(manifold):
    loss = ProxyGML(manifold, 7, proxies_per_class=3, ratio=0.5).double()
    points = manifold.proxy_points(loss.proxies).flatten(0, 1)
    owner = torch.arange(7).repeat_interleave(3)
    similarity = manifold.similarity(points, points)  # (CN, CN)
    logits = similarity @ torch.nn.functional.one_hot(owner).double()
    expected = torch.nn.functional.cross_entropy(logits, owner)
    torch.testing.assert_close(loss.regularizer(), expected, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(value, loss.proxies)[0] for value in (loss.regularizer(), expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("classes", "per_class", "ratio", "k"), [(100, 12, 0.05, 60), (98, 12, 0.05, 59), (11318, 1, 0.05, 566)]
)
def test_linked_proxies_of_the_papers_data_sets(classes: int, per_class: int, ratio: float, k: int):
    assert ProxyGML(Sphere(2), classes, proxies_per_class=per_class, ratio=ratio).linked == k


def test_fewer_than_the_own_proxies_are_raised_to_them_and_said():
    with pytest.warns(UserWarning, match="links 3 proxies, no more than the 12 of a class; 12 are linked"):
        assert ProxyGML(Sphere(2), 5).linked == 12


def test_a_ratio_that_selects_nothing_is_refused():
    with pytest.raises(ValueError, match="5 classes x 2 proxies links none; expected a ratio of at least"):
        ProxyGML(Sphere(2), 5, proxies_per_class=2)


def test_nan_is_not_taken_for_a_class_without_links():
    loss = ProxyGML(Sphere(2), 2, proxies_per_class=1, ratio=1.0, regularizer_weight=0)
    loss.proxies.data[0] = torch.nan
    assert loss(torch.eye(2), torch.tensor([0, 1])).isnan()


def test_proxies_start_as_short_as_those_of_the_authors_code():
    authors = nn.init.kaiming_uniform_(torch.empty(512, 78 * 12), a=5**0.5)
    norms = ProxyGML(Sphere(512), 78, proxy_norm=(512 / (3 * 78 * 12)) ** 0.5).proxies.norm(dim=-1)
    torch.testing.assert_close(norms.mean(), authors.norm(dim=0).mean(), rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("classes", "per_class", "ratio"), [(19, 12, 0.05), (20, 12, 0.05), (20, 1, 0.05), (49, 1, 1 / 49)]
)
def test_as_many_links_as_own_proxies_leave_no_other_class_and_no_loss(classes: int, per_class: int, ratio: float):
    sphere, labels = Sphere(4), torch.arange(3)
    with pytest.warns(UserWarning, match=rf"links {per_class} proxies, no more than the {per_class} of a class"):
        loss = ProxyGML(sphere, classes, proxies_per_class=per_class, ratio=ratio, regularizer_weight=0)
    points = sphere.from_features(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    proxies = sphere.proxy_points(loss.proxies.detach())
    expected = naive(points, labels, proxies, k=per_class, scale=1.0, lam=0.0, positive=True, masked=True)
    assert loss(points, labels).item() == expected.item() == 0


def test_a_single_link_without_the_own_proxies_leaves_no_loss():
    sphere, labels = Sphere(4), torch.arange(3)
    with pytest.warns(UserWarning, match=r"ratio 0.05 links 1 proxy, .* its loss is 0; use a ratio above 0.05 "):
        loss = ProxyGML(sphere, 20, proxies_per_class=1, ratio=0.05, regularizer_weight=0, positive_mask=False)
    points = sphere.from_features(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    value = loss(points, labels)
    assert value.item() == 0 and not torch.autograd.grad(value, loss.proxies)[0].any()


@pytest.mark.filterwarnings("ignore:ProxyGML")
@pytest.mark.parametrize("per_class", [1, 2, 7])
def test_the_ratios_that_messages_name_suffice(per_class: int):
    for classes in range(2, 200):
        with pytest.raises(ValueError, match="links none") as error:
            ProxyGML(Sphere(2), classes, proxies_per_class=per_class, ratio=0.99 / (classes * per_class))
        ratio = float(str(error.value).split()[-1])
        assert ratio < 1.2 / (classes * per_class)
        assert ProxyGML(Sphere(2), classes, proxies_per_class=per_class, ratio=ratio).linked >= per_class
        with pytest.warns(UserWarning) as warned:
            ProxyGML(Sphere(2), classes, proxies_per_class=per_class, ratio=1 / classes)
        above = float(str(warned[0].message).split("ratio above ")[1].split()[0])
        assert ProxyGML(Sphere(2), classes, proxies_per_class=per_class, ratio=above + 1e-6).linked > per_class
