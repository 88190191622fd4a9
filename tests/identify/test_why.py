"""What pairs of patches contribute to a similarity: against double loops, other formulas and finite differences."""

from collections.abc import Callable
from math import cos, sin
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dmlkit.backbones import SmallCNN
from dmlkit.backbones.base import Backbone
from dmlkit.datasets.files.samples import samples_named
from dmlkit.errors import UserError
from dmlkit.heads import Linear, MobiusLinear
from dmlkit.identify.why import painted_falls, pair_contributions
from dmlkit.manifolds import Euclidean, Lorentz, Manifold, Poincare, Sphere
from dmlkit.model import EmbeddingModel
from dmlkit.pooling import Avg, AvgMax, Cls, GeM, Max, Pooling
from dmlkit.run_folder.folder import RunFolder
from tests.conftest import Cli
from tests.processes import command_line, run_on_ranks

A, B = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Pooled(Backbone):
    """One convolution and a pooling."""

    num_features = 6

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, kernel_size=8, stride=8)
        self.pooling = pooling

    def blocks(self) -> list[nn.Module]:
        return [self.convolution]

    def forward(self, images: Tensor) -> Tensor:
        return self.pooling(self.convolution(images).relu())


def model_of(backbone: Backbone, manifold: Manifold, head: type[Linear | MobiusLinear] = Linear) -> EmbeddingModel:
    torch.manual_seed(1)
    built = head(backbone.num_features, manifold)
    for parameter in built.get_submodule("linear").parameters():
        nn.init.normal_(parameter)
    return EmbeddingModel(nn.Identity(), backbone, built, samples_named("image").of(None)).eval()


def test_a_cosine_is_the_double_sum_over_patches():
    torch.manual_seed(0)
    backbone = SmallCNN(width=4)
    model = model_of(backbone, Sphere(8))
    contributions = pair_contributions(model, A, B)
    with torch.no_grad():
        maps = backbone.layers(torch.stack([A, B])).double()
    (weight, bias) = (one.detach().double() for one in model.head.get_submodule("linear").parameters())
    parts = [[(weight @ one[:, p // 4, p % 4] + bias) / 16 for p in range(16)] for one in maps]
    lengths = [torch.stack(one).sum(0).norm() for one in parts]
    for p in range(16):
        for q in range(16):
            expected = (parts[0][p] @ parts[1][q]) / (lengths[0] * lengths[1])
            assert float(contributions.values[p, q]) == pytest.approx(float(expected), abs=1e-6)
    with torch.no_grad():
        x, y = model(torch.stack([A, B]))
    assert contributions.is_sum and float(contributions.values.sum()) == pytest.approx(float(x @ y), abs=1e-5)
    assert contributions.grid == (4, 4) and min(contributions.spread) > 0.01  # the bias


@pytest.mark.parametrize("pooling", [Avg(), Max(), AvgMax(), GeM()], ids=lambda one: type(one).__name__)
def test_every_pooling_divides_the_similarity_without_a_rest(pooling: Pooling):
    model = model_of(Pooled(pooling), Sphere(8))
    nn.init.zeros_(model.head.get_parameter("linear.bias"))
    contributions = pair_contributions(model, A, B)
    assert contributions.is_sum and float(contributions.values.sum()) == pytest.approx(contributions.score, abs=1e-5)
    assert max(contributions.spread) < 1e-5  # GeM clamps features at 1e-6
    same = pair_contributions(model, A, A)
    assert float(same.values.sum()) == pytest.approx(1.0, abs=1e-5)
    if isinstance(pooling, Max):  # a patch has the channels of which it is the maximum, and no others
        with torch.no_grad():
            maps = model.backbone.get_submodule("convolution")(A[None]).relu()[0].flatten(1)
            weight = model.head.get_parameter("linear.weight")
            parts = [weight @ (maps[:, p] * (maps.argmax(1) == p)) for p in range(4)]
        length = sum(parts, torch.zeros(8)).norm()
        expected = torch.stack([torch.stack([x @ y for y in parts]) for x in parts]) / length**2
        torch.testing.assert_close(same.values.float(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("manifold", [Euclidean(8), Poincare(8), Lorentz(8)], ids=lambda one: type(one).__name__)
def test_a_distance_is_divided_by_its_slope_along_the_inner_product(manifold: Manifold):
    """The slope by turning one vector, which leaves both lengths as they are."""
    torch.manual_seed(0)
    model = model_of(Pooled(Avg()), manifold)
    with torch.no_grad():
        x, y = model.head.project(model.backbone(torch.stack([A, B]))).double()
    first = x / x.norm()
    across = y - first * (first @ y)
    across = across / across.norm()

    def turned(angle: float) -> tuple[float, float]:
        z = x.norm() * (cos(angle) * first + sin(angle) * across)
        return float(manifold.paired_similarity(*map(manifold.from_features, (z, y)))), float(z @ y)

    (above, more), (below, less) = turned(1e-4), turned(-1e-4)
    contributions = pair_contributions(model, A, B)
    assert not contributions.is_sum
    assert float(contributions.values.sum()) == pytest.approx(float(x @ y) * (above - below) / (more - less), rel=1e-3)


class Scaled(nn.Module):
    """Pixels from bytes."""

    def forward(self, images: Tensor) -> Tensor:
        return images.float() / 255


def test_falls_are_those_of_images_with_one_patch_painted():
    model = model_of(Pooled(Avg()), Poincare(8))
    model.normalization = Scaled()
    images = (torch.stack([A, B]) * 255).to(torch.uint8)
    falls = painted_falls(model, images, (2, 2))

    def distance(first: Tensor, second: Tensor) -> float:
        with torch.no_grad():
            x, y = model(torch.stack([first, second])).double()
        return float(model.manifold.paired_similarity(x[None], y[None]))

    for side in (0, 1):
        for patch in range(4):
            painted, (row, column) = images.clone(), divmod(patch, 2)
            for channel in range(3):
                mean = round(float(images[side, channel].double().mean()))
                painted[side, channel, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = mean
            expected = distance(*images) - distance(*painted)
            assert falls[side][patch] == pytest.approx(expected, abs=1e-5)


def test_parts_of_a_hyperbolic_head_and_of_a_class_token():
    contributions = pair_contributions(model_of(Pooled(Avg()), Poincare(8), MobiusLinear), A, B)
    assert bool(contributions.values.isfinite().all())
    with pytest.raises(UserError, match="the class token, which is not pooled from patches"):
        pair_contributions(model_of(Pooled(Cls()), Sphere(8)), A, B)


def test_the_command_explains_the_score_of_search(dmlkit: Cli, trained_once: Callable[..., Path], tmp_path: Path):
    trained_run = trained_once(tmp_path / "trained")
    dataset = RunFolder(trained_run).recipe().dataset.build("test")
    for name, index in (("a", 0), ("b", 1)):
        Image.fromarray(dataset.sample(index).permute(1, 2, 0).numpy()).save(tmp_path / f"{name}.png")
    pair = tmp_path / "a.png", tmp_path / "b.png"
    report = dmlkit("why", trained_run, *pair, "--json", "-o", tmp_path / "why.svg").json()
    assert dmlkit("embed", trained_run, pair[0], "-o", tmp_path / "one").code == 0
    searched = dmlkit("search", tmp_path / "one", pair[1], "--json").json()
    (score,) = (neighbor["similarity"] for query in searched["queries"] for neighbor in query["neighbors"])
    assert sum(map(sum, report["contributions"])) == pytest.approx(score, abs=1e-5)
    assert "a.png" in (tmp_path / "why.svg").read_text() and report["threshold"] is None
    shown = dmlkit("why", trained_run, *pair, "-n", "2")
    best = max(max(row) for row in report["contributions"])
    assert shown.code == 0 and f"{best:.4f}" in shown.out and "sum to the cosine" in shown.out
    (tmp_path / "c.png").write_bytes(b"no image")
    for bad, message in ((tmp_path, "this is a folder"), (tmp_path / "d.png", "no such file"), ("c", "c.png")):
        dmlkit("why", trained_run, pair[0], tmp_path / "c.png" if bad == "c" else bad).refused(message)


@pytest.mark.heavy
def test_one_of_two_ranks_prints(trained_once: Callable[..., Path], tmp_path: Path):
    trained_run = trained_once(tmp_path / "trained")
    image, output = tmp_path / "a.png", tmp_path / "why.png"
    Image.new("RGB", (32, 32), "red").save(image)
    words = ("why", trained_run, image, image, "-o", output, "--device", "cpu")
    printed = run_on_ranks(2, command_line, *map(str, words))
    assert "".join(printed).count(f"written to {output}") == 1 and output.exists()
