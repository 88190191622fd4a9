import pytest
import torch
from torch.nn.functional import normalize

from dmlkit.losses import Contrastive, CrossBatchMemory, Matryoshka, MultiSimilarity, ProxyAnchor, SigmoidPairs, Triplet
from dmlkit.manifolds import Euclidean, Lorentz, Poincare, Sphere
from dmlkit.recipe.file import parse_recipe
from tests.conftest import refuses

LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 2, 0])
NESTED = CrossBatchMemory.Config(loss=Triplet.Config(), size=20)


def features(width=6, seed=0):
    return torch.randn(8, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("space", "config"),
    [
        (Euclidean(6, clip_distance=2.0), Contrastive.Config()),
        (Lorentz(6), ProxyAnchor.Config()),
        (Sphere(6), NESTED),
        (Sphere(6), SigmoidPairs.Config()),
    ],
)
def test_one_prefix_of_full_width_is_the_plain_loss_to_the_bit(space, config):
    torch.manual_seed(3)
    plain = config.build(space, 3).double()
    torch.manual_seed(3)
    loss = Matryoshka(space, 3, loss=config, dims=(6,)).double()
    for epoch in range(3):
        results = []
        for one in (plain, loss):
            torch.manual_seed(epoch)
            one.set_epoch(epoch)
            learned = [part for part in one.parameters() if part.requires_grad]
            leaf = features(seed=epoch).requires_grad_()
            value = one(space.from_features(leaf), LABELS)
            results.append((value, *torch.autograd.grad(value, (leaf, *learned))))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_on_the_sphere_it_is_the_weighted_sum_over_normalized_prefixes():
    x, weights = features().requires_grad_(), {6: 1.0, 4: 0.5, 2: 2.0}
    loss = Matryoshka(Sphere(6), loss=MultiSimilarity.Config(), dims=(6, 4, 2), weights=(1.0, 0.5, 2.0))
    expected = sum(c * MultiSimilarity(Sphere(m))(normalize(x[:, :m], dim=1), LABELS) for m, c in weights.items())
    value = loss(normalize(x, dim=1), LABELS)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, x), torch.autograd.grad(expected, x))


def test_each_prefix_has_proxies_of_its_own():
    torch.manual_seed(0)
    loss = Matryoshka(Euclidean(6), 3, loss=ProxyAnchor.Config(), dims=(6, 2)).double()
    proxies = dict(loss.named_parameters())
    assert [tuple(one.shape) for one in proxies.values()] == [(3, 6), (3, 2)]
    x, expected = features(), 0
    for width, one in zip((6, 2), proxies.values(), strict=True):
        plain = ProxyAnchor(Euclidean(width), 3).double()
        plain.load_state_dict({"proxies": one.detach()})
        expected += plain(x[:, :width], LABELS)
    torch.testing.assert_close(loss(x, LABELS), expected)


@pytest.mark.parametrize("kind", [Poincare, Lorentz])
def test_in_hyperbolic_space_a_prefix_is_the_point_of_the_first_features(kind):
    """And a learned curvature is one number for all prefixes, which each moves."""
    space = kind(6, curvature=-0.5, learnable_curvature=True).double()
    x = 0.4 * features()
    loss = Matryoshka(space, dims=(6, 3)).double()
    (curvature,) = loss.parameters()
    short = kind(3, curvature=-0.5, learnable_curvature=True).double()

    def by_hand(x):
        return Contrastive(space)(space.from_features(x), LABELS) + Contrastive(short)(
            short.from_features(x[:, :3]), LABELS
        )

    torch.testing.assert_close(loss(space.from_features(x), LABELS), by_hand(x))
    (of_all,) = torch.autograd.grad(loss(space.from_features(x), LABELS), curvature)
    of_parts = torch.autograd.grad(by_hand(x), [*space.parameters(), *short.parameters()])
    torch.testing.assert_close(of_all, sum(of_parts), rtol=1e-6, atol=1e-9)


def test_by_default_the_width_is_halved_while_8_remain():
    assert Matryoshka(Sphere(100)).dims == (100, 50, 25, 12)
    assert Matryoshka(Sphere(4)).dims == (4,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("dims: [32, 32]", r"loss\.dims: expected numbers that fall, each smaller than the one before; got \[32, 32\]"),
        ("dims: []", r"loss\.dims"),
        ("dims: [64, 32]", "needs embedding_dim 64, got 32, because the first of loss.dims is the full width"),
        ("dims: [32, 8], weights: [1]", r"loss.weights: got \(1.0,\), expected one for each of dims \(32, 8\)"),
        ("weights: [1]", r"loss.weights: got \(1.0,\), expected one for each of dims; set dims too"),
        ("loss: {name: proxy_ancor}", "proxy_anchor"),
    ],
)
def test_bad_prefixes_are_refused_when_the_recipe_is_read(options, message):
    text = f"dataset: {{name: glyphs}}\nembedding_dim: 32\nloss: {{name: matryoshka, {options}}}\n"
    sampler = "sampler: {name: class_balanced, classes_per_batch: 4, images_per_class: 4}\n"
    refuses(message, parse_recipe, text + sampler, "r.yaml")


def test_the_needs_of_the_inner_loss_are_those_of_the_whole():
    text = "dataset: {name: glyphs}\nmanifold: {name: euclidean}\nloss: {name: matryoshka, loss: {name: circle}}\n"
    refuses(r"loss\.loss: circle needs manifold\.similarity cosine", parse_recipe, text, "r.yaml")


def test_a_wrong_width_or_a_built_loss_is_refused_in_python():
    with pytest.raises(ValueError, match="expected the first to be the embeddings' width 6, got 4"):
        Matryoshka(Sphere(6), dims=(4, 2))
    with pytest.raises(ValueError, match="Matryoshka: loss: got Contrastive, expected LossConfig"):
        Matryoshka(Sphere(6), loss=Contrastive(Sphere(6)))
