"""Training of a part of a backbone: through any interruption to the same bits, with checkpoints of that part alone."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone
from dmlkit.distributed.launch import start_ranks
from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.checkpoint_file import write_checkpoint
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.progress import Silent
from dmlkit.training.train import train
from dmlkit.vectors.trained import FROZEN, load_model
from tests.conftest import TINY_RECIPE, Result, refuses
from tests.contracts.test_backbones import config
from tests.training.test_train import assert_equal_weights, weights

Command = Callable[..., Result]
TUNED = {
    "none": "{name: none}",
    "last_blocks": "{name: last_blocks, blocks: 2}",
    "lora": "{name: lora, targets: all, rank: 2}",
}
DROPOUT = "backbone={name: timm, model: test_vit, image_size: 32, arguments: {drop_rate: 0.2, proj_drop_rate: 0.2}}"


class Stopper(Silent):
    """Asks the run to stop at a step: the first, or the last of an epoch."""

    def __init__(self, epoch: int, last: bool) -> None:
        self.epoch_to_stop, self.last = epoch, last

    def step(self, **figures: Any) -> None:
        if figures["epoch"] == self.epoch_to_stop and (figures["progress"] == 1 or not self.last):
            os.kill(os.getpid(), signal.SIGTERM)


def trained(run: Path, *overrides: str, text: str = TINY_RECIPE, **options: Any) -> Path:
    train(parse_recipe(text, "tiny.yaml", ["training.workers=0", *overrides]), run, device="cpu", **options)
    return run


@pytest.mark.heavy
@pytest.mark.parametrize(
    "overrides",
    [
        ("backbone.freeze_epochs=1",),
        (DROPOUT, "transform.size=32"),
        ("loss={name: norm_softmax, negative_fraction: 0.5}",),
        *((f"backbone.tuning={tuning}",) for tuning in TUNED.values()),
    ],
    ids=["first epoch frozen", "dropout", "classes drawn", *TUNED],
)
def test_a_stopped_run_ends_with_the_same_bits(overrides: tuple[str, ...], tmp_path: Path):
    whole = weights(trained(tmp_path / "whole", *overrides))
    for epoch, last in ((0, False), (0, True), (1, False)):
        run = tmp_path / f"{epoch} {last}"
        with pytest.raises(TrainingStoppedError):
            trained(run, *overrides, progress=Stopper(epoch, last))
        trained(run, *overrides, resume=True)
        assert_equal_weights(weights(run), whole)


def start() -> Any:
    """The state dict that the tiny recipe's backbone begins with."""
    torch.manual_seed(3)
    return config("small_cnn", width=4).build().state_dict()


@pytest.mark.parametrize("epochs", [2, 3])
def test_frozen_epochs_without_a_backward_pass_end_with_the_bits_of_dropped_gradients(epochs, tmp_path, monkeypatch):
    """Forward and backward through everything, and no step of the backbone; batch norms see the images all the same."""
    overrides = (f"backbone.freeze_epochs={epochs}", "training.clip_grad_norm=0.5")
    state = weights(trained(tmp_path / "found", *overrides))
    seen: list[int] = []

    def note(_: Backbone, epoch: int) -> bool:
        seen.append(epoch)
        return False

    def drop(_: object, experiment: Any) -> None:
        for parameter in experiment.model.backbone.parameters() if seen[-1] < epochs else ():
            assert parameter.grad is not None
            parameter.grad = None

    monkeypatch.setattr(Backbone, "set_epoch", note)
    monkeypatch.setattr(sys.modules["dmlkit.training.train"], "average_gradients", drop)
    assert_equal_weights(weights(trained(tmp_path / "dropped", *overrides)), state)
    same = torch.equal(state["backbone.layers.0.weight"], start()["layers.0.weight"])
    assert same == (epochs == 3)  # of 3
    assert not torch.equal(state["backbone.layers.1.running_mean"], start()["layers.1.running_mean"])


VIT: dict[str, Any] = {"model": "test_vit", "image_size": 32}
PRETRAINED = (
    TINY_RECIPE.replace("{name: plain, size: 16}", "{name: plain, size: 32}")
    .replace(
        "{name: small_cnn, width: 4}", "{name: timm, model: test_vit, image_size: 32, weights: FILE, tuning: TUNING}"
    )
    .replace("epochs: 3", "epochs: 2")
)
VIT_TUNED = {**TUNED, "lora": "{name: lora, rank: 2}"}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights."""
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp("weights") / "vit.pth"
    backbone: Any = config("timm", **VIT).build()
    torch.save(backbone.network.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def runs(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of pretrained weights for each tuning."""
    folder, text = tmp_path_factory.mktemp("tuned"), PRETRAINED.replace("FILE", str(pretrained))
    return {name: trained(folder / name, text=text.replace("TUNING", tuning)) for name, tuning in VIT_TUNED.items()}


@pytest.fixture(params=sorted(VIT_TUNED))
def tuned(request: pytest.FixtureRequest, runs: dict[str, Path]) -> Path:
    return runs[request.param]


@pytest.fixture
def lora(runs: dict[str, Path]) -> Path:
    return runs["lora"]


def test_a_checkpoint_holds_what_trains_and_a_hash_of_the_rest(tuned: Path, pretrained: Path):
    saved = RunFolder(tuned).load_checkpoint("last")
    backbone = load_model(RunFolder(tuned), start_ranks("cpu"), merged=False).model.backbone
    held = {f"backbone.{name}" for name in backbone.state_dict()} - {f"backbone.{n}" for n in backbone.frozen_names}
    assert set(saved["model"]) == held | {"head.linear.weight", "head.linear.bias"}
    assert len(saved[FROZEN]) == 64 and backbone.frozen_names
    file = torch.load(pretrained, weights_only=True)
    for name in backbone.frozen_names:
        plain = name.removeprefix("network.").replace("parametrizations.weight.original", "weight")
        assert torch.equal(backbone.state_dict()[name], file[plain]), name


def test_embeddings_are_those_of_the_weights_that_were_trained(tuned: Path, pretrained: Path):
    """Put together by hand: the file of weights, and what the checkpoint has beside or in place of them."""
    ranks = start_ranks("cpu")
    loaded = load_model(RunFolder(tuned), ranks, "last")
    saved, file = RunFolder(tuned).load_checkpoint("last")["model"], torch.load(pretrained, weights_only=True)
    plain: Any = config("timm", **VIT).build().eval()
    by_hand: dict[str, Tensor] = {}
    for name, tensor in file.items():
        start = f"backbone.network.{name.removesuffix('weight')}parametrizations.weight.0"
        update = 8.0 * saved[f"{start}.up"] @ saved[f"{start}.down"] if f"{start}.up" in saved else 0  # alpha / rank
        by_hand[name] = saved.get(f"backbone.network.{name}", tensor) + update
    plain.network.load_state_dict(by_hand)
    head = nn.Linear(plain.num_features, 8)
    head.load_state_dict({name: saved[f"head.linear.{name}"] for name in ("weight", "bias")})
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        expected = nn.functional.normalize(head(plain(loaded.model.normalization(images))))
        torch.testing.assert_close(loaded.model(images), expected, atol=1e-5, rtol=0)


def test_other_or_no_pretrained_weights_are_refused_in_one_line(tuned: Path, pretrained: Path, dmlkit: Command):
    before = pretrained.read_bytes()
    tensors = torch.load(pretrained, weights_only=True)
    try:
        torch.save({name: tensor + 1 for name, tensor in tensors.items()}, pretrained)
        commands = (["eval", tuned], ["train", tuned / "recipe.yaml", "-o", tuned, "--resume"])
        for command in commands:
            shutil.rmtree(tuned / "vectors", ignore_errors=True)  # what is stored needs no weights
            dmlkit(*command, "--device", "cpu").refused("other weights than those that the run was trained on")
        pretrained.unlink()
        for command in commands:
            dmlkit(*command, "--device", "cpu").refused(f"backbone.weights: {pretrained}: no such file")
    finally:
        pretrained.write_bytes(before)
    assert dmlkit("train", tuned / "recipe.yaml", "-o", tuned, "--resume", "--device", "cpu").code == 0


def test_weights_of_a_run_that_have_moved_are_to_be_restored(lora, pretrained, tmp_path, dmlkit):
    """No option and no change of its recipe gives a trained run another place of them."""
    assert dmlkit("eval", lora, "--device", "cpu").code == 0  # the histogram finds the stored embeddings
    hidden = pretrained.rename(tmp_path / "hidden.pth")
    try:
        for words in (
            ["plot", "histogram", lora],
            ["eval", lora, "--split", "train"],
            ["inspect", lora, "--split", "all"],
            ["final", lora, "-o", tmp_path / "final"],
        ):
            refused = dmlkit(*words, "--device", "cpu", *(["-o", tmp_path / "x.html"] if "inspect" in words else []))
            expected = f"{pretrained}: no such file; restore it, because {lora} was trained on it\n"
            assert refused.code == 2 and refused.err.endswith(expected), refused.err
        with pytest.raises(UserError, match=f"no such file; restore it, because {lora} was trained on it"):
            train(RunFolder(lora).recipe(), lora, device="cpu", resume=True)
        refuses("if it has moved, use --set backbone", train, RunFolder(lora).recipe(), tmp_path / "new", device="cpu")
    finally:
        hidden.rename(pretrained)


def test_a_damaged_hash_is_refused(lora: Path):
    run = RunFolder(lora)
    path, state = run.checkpoint_path("last"), run.load_checkpoint("last")
    before = path.read_bytes()
    write_checkpoint(path, {**state, FROZEN: [1]})
    refuses("other weights", load_model(run, start_ranks("cpu"), "last").build)
    path.write_bytes(before)


@pytest.mark.parametrize("form", ["safetensors", "torch-export", "onnx"])
def test_exports_are_merged_and_agree_with_the_run(lora: Path, form: str, dmlkit: Command, tmp_path: Path):
    if form == "onnx":
        pytest.importorskip("onnxscript")
    output = tmp_path / f"model.{form}"
    dmlkit("export", lora, "--format", form, "-o", output).ok()
    if form == "safetensors":
        from safetensors import safe_open

        with safe_open(output, "pt") as file:
            names = {name.removeprefix("backbone.") for name in file.keys()}  # noqa: SIM118
        assert names >= set(config("timm", **VIT).build().state_dict())
        assert not [name for name in names if "parametrizations" in name]
