"""The gradient cache: the gradients of one pass, from one chunk of the batch at a time."""

import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.heads import Linear
from dmlkit.losses import LossConfig
from dmlkit.manifolds import Sphere
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.experiment import assemble
from dmlkit.training.gradient_checkpointing import recompute_blocks, recompute_chunks
from tests.conftest import TINY_RECIPE, refuses
from tests.contracts.test_backbones import config
from tests.training.test_gradient_checkpointing import DROPPING
from tests.training.test_train import assert_equal_weights, weights
from tests.training.test_tuning import Stopper, trained

CHUNK, BATCH, SIDE = 3, 8, 32
BACKBONES: dict[str, dict[str, Any]] = {
    "vit": {"model": "test_vit", "image_size": SIDE},
    "lora": {"model": "test_vit", "image_size": SIDE, "tuning": {"name": "lora", "rank": 2}},
    "dropout": {"model": "test_vit", "image_size": SIDE, "arguments": DROPPING},
    "batch norm": {"model": "test_efficientnet"},
}


def built(name: str) -> nn.Module:
    """A backbone and a head, from images to points on the sphere."""
    torch.manual_seed(7)
    backbone = config("timm", **BACKBONES[name]).build()
    return nn.Sequential(backbone, Linear(backbone.num_features, Sphere(6))).train()


def gradients(model: nn.Module, loss: nn.Module) -> dict[str, Tensor]:
    parameters = dict([*model.named_parameters(), *loss.named_parameters(prefix="loss")])
    found = {name: parameter.grad for name, parameter in parameters.items()}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def two_phases(model: nn.Module, loss: nn.Module, images: Tensor, labels: Tensor, chunk: int = CHUNK) -> Tensor:
    """Section 3.2 of the paper, written out: embeddings without graph, their gradients, then chunk by chunk."""
    with torch.no_grad():
        points = torch.cat([model(part) for part in images.split(chunk)])
    value = loss(points.requires_grad_(), labels)
    value.backward()
    for part, gradient in zip(images.split(chunk), points.grad.split(chunk), strict=True):
        (model(part) * gradient).sum().backward()
    return value.detach()


@pytest.mark.parametrize(
    ("name", "loss"),
    [("vit", "multi_similarity"), ("vit", "proxy_anchor"), ("vit", "sum"), ("lora", "cross_batch_memory")],
)
def test_gradients_are_those_of_one_pass_and_of_the_two_phases_of_the_paper(name: str, loss: str):
    """In float64, over two steps, so that a memory has embeddings of the first one."""
    values: list[list[Tensor]] = []
    found: list[dict[str, Tensor]] = []
    for step in ("one pass", "two phases", "chunks"):
        model = built(name).double()
        torch.manual_seed(1)
        objective = LossConfig.variants[loss]().build(Sphere(6), 4).double()
        if step == "chunks":
            recompute_chunks(model, CHUNK)
        values.append([])
        for seed in (2, 3):
            generator = torch.Generator().manual_seed(seed)
            images = torch.rand(BATCH, 3, SIDE, SIDE, dtype=torch.float64, generator=generator)
            labels = torch.arange(BATCH) % 4
            if step == "two phases":
                values[-1].append(two_phases(model, objective, images, labels))
            else:
                values[-1].append(objective(model(images), labels))
                values[-1][-1].backward()
        found.append(gradients(model, objective))
    assert len(found[0]) > 4 and max(gradient.abs().max() for gradient in found[0].values()) > 1e-3
    for other in (1, 2):
        torch.testing.assert_close(values[other], values[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(found[other], found[0], rtol=0, atol=1e-10)


def test_under_autocast_the_gradients_of_chunks_are_summed_in_full_precision():
    images, labels = torch.rand(BATCH, 3, SIDE, SIDE), torch.arange(BATCH) % 4
    found: list[dict[str, Tensor]] = []
    for is_cached in (False, True):
        model, loss = built("vit"), LossConfig.variants["multi_similarity"]().build(Sphere(6), 4)
        if is_cached:
            recompute_chunks(model, 2)
            with torch.autocast("cpu", torch.bfloat16):
                points = model(images)
            loss(points, labels).backward()
        else:
            two_phases(AutocastForward(model), loss, images, labels, 2)
        found.append(gradients(model, loss))
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


class AutocastForward(nn.Module):
    """A model in bfloat16, which casts its weights in every pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(images)


@pytest.mark.parametrize("name", ["dropout", "batch norm"])
@pytest.mark.parametrize("blocks", [False, True], ids=["", "and blocks"])
def test_both_passes_of_a_chunk_draw_the_same_and_statistics_are_updated_once(name: str, blocks: bool):
    """The same bits as those chunks with everything kept, also if the blocks are recomputed within the chunks."""
    images = torch.rand(BATCH, 3, SIDE, SIDE)
    found: list[tuple[dict[str, Tensor], Tensor]] = []
    states: list[dict[str, Tensor]] = []
    for is_cached in (False, True):
        model: Any = built(name)
        if is_cached and blocks:
            recompute_blocks(model[0])
        model = deepcopy(model)  # as a batch of one image is tried
        if is_cached:
            recompute_chunks(model, CHUNK)
        torch.manual_seed(5)
        for _ in range(2):
            parts = [images] if is_cached else images.tensor_split(3)
            torch.cat([model(part) for part in parts]).square()[:, 0].sum().backward()
        found.append((gradients(model, nn.Identity()), torch.get_rng_state()))
        states.append(model.state_dict())
    assert any(gradient.abs().max() > 0 for gradient in found[0][0].values())
    assert_equal_weights(found[1][0], found[0][0])
    assert_equal_weights(states[1], states[0])
    assert torch.equal(found[1][1], found[0][1])


class Counting(nn.Module):
    """A network of two layers that counts its passes, and how many of its hidden activations exist at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.live: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = self.largest = self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls, self.largest = self.calls + 1, max(self.largest, len(inputs))
        hidden = (inputs * self.weight).exp()
        self.live.add(hidden)
        self.most = max(self.most, len(self.live))
        return (hidden * self.weight).exp()


@pytest.mark.parametrize(
    ("chunk", "calls", "largest"), [(3, 6, 3), (4, 4, 4), (1, 16, 1), (7, 4, 4), (BATCH, 1, BATCH), (100, 1, BATCH)]
)
def test_activations_of_one_chunk_are_held_at_a_time(chunk: int, calls: int, largest: int):
    """Each chunk has a pass forward and one backward; one that holds the batch has one in all, and so without grad."""
    model = Counting()
    recompute_chunks(model, chunk)
    model(torch.rand(BATCH, 5)).sum().backward()
    assert (model.most, model.calls, model.largest) == (1, calls, largest)
    with torch.no_grad():
        model(torch.rand(BATCH, 5))
    assert model.calls == calls + 1


SMALLEST = "backbone={name: timm, model: test_efficientnet}"
FROZEN_STATISTICS = "backbone={name: small_cnn, width: 4, freeze_batchnorm_statistics: true}"


@pytest.mark.parametrize(
    ("overrides", "within"),
    [
        (("loss={name: cross_batch_memory}", "training.accumulate=2", "training.ema=0.5"), 1e-5),
        (("training.precision=bf16",), 0.05),  # gradients of weights are rounded to 8 bits, once per chunk
    ],
    ids=["memory", "bf16"],
)
def test_a_run_has_the_weights_of_one_without_chunks(overrides: tuple[str, ...], within: float, tmp_path: Path):
    overrides = (*overrides, FROZEN_STATISTICS, "optimizer={name: riemannian_sgd, lr: 0.1}", "training.epochs=1")
    runs = {key: trained(tmp_path / key, *overrides, f"training.gradient_cache={key}") for key in ("null", "3")}
    plain, cached = (torch.cat([one.flatten() for one in weights(run).values()]) for run in runs.values())
    start = assemble(parse_recipe(TINY_RECIPE, "r.yaml", overrides))
    before = [*start.model.state_dict().values(), *start.objective.state_dict().values()]
    moved = plain - torch.cat([one.flatten() for one in before])
    assert (cached - plain).norm() < within * moved.norm()
    assert not torch.equal(cached, plain)  # sums are rounded elsewhere


def test_a_stopped_run_with_dropout_ends_with_the_same_bits(tmp_path: Path):
    backbone = "backbone={name: timm, model: test_vit, image_size: 32, arguments: {drop_rate: 0.2}}"
    overrides = (backbone, "transform.size=32", "training.epochs=2", f"training.gradient_cache={CHUNK}")
    whole = trained(tmp_path / "whole", *overrides)
    with pytest.raises(TrainingStoppedError):
        trained(tmp_path / "stopped", *overrides, progress=Stopper(0, last=False))
    assert RunFolder(tmp_path / "stopped").load_checkpoint("last")["step"] == 1
    assert_equal_weights(weights(trained(tmp_path / "stopped", *overrides, resume=True)), weights(whole))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("training.gradient_cache=0",), "training.gradient_cache: got 0, expected greater than 0"),
        (
            ("backbone={name: resnet18, tuning: {name: none}}", "training.gradient_cache=4"),
            "backbone.tuning: none needs training.gradient_cache null, got 4, because no weight of the backbone trains",
        ),
        (
            (SMALLEST, "transform.size=32", "training.gradient_cache=1"),
            "training.gradient_cache: a chunk of 1 image is too small for batch norms; use larger chunks: ",
        ),
        (
            (SMALLEST, "transform.size=32", "sampler.batch_size=3", "training.gradient_cache=2"),
            "training.gradient_cache: a chunk of 1 image is too small for batch norms; use larger chunks: ",
        ),
    ],
    ids=["zero", "frozen", "single images", "a rest of one"],
)
def test_chunks_that_cannot_be_are_one_line(overrides: tuple[str, ...], message: str):
    refuses(message, lambda: assemble(parse_recipe(TINY_RECIPE, "r.yaml", overrides)))


@pytest.mark.parametrize(
    ("overrides", "chunk", "rank", "warned"),
    [((), 3, 0, True), ((), 3, 1, False), ((), 4, 0, False), ((FROZEN_STATISTICS,), 3, 0, False)],
    ids=["chunks", "second rank", "one chunk", "frozen"],
)
def test_batch_norms_that_compute_statistics_get_a_warning_of_the_first_rank(overrides, chunk, rank, warned, recwarn):
    """Each of 2 ranks has 4 of the 8 images of a batch."""
    text = TINY_RECIPE.replace("{epochs: 3}", f"{{epochs: 3, gradient_cache: {chunk}}}")
    assemble(parse_recipe(text, "r.yaml", overrides), rank, 2)
    expected = "r.yaml:9: training.gradient_cache: batch norms compute their statistics per chunk instead of per batch"
    warnings = [str(warning.message) for warning in recwarn]
    assert [one.startswith(expected) for one in warnings] == [True] * warned
