"""Training by a naive loop, with steps of several batches, through an interruption, and without unreadable images."""

import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import cos, pi
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import dmlkit as library
from dmlkit.distributed.launch import Ranks
from dmlkit.losses import ProxyAnchor
from dmlkit.model import build_model
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.experiment import assemble
from dmlkit.training.train import take_step
from tests.conftest import END, TINY_RECIPE
from tests.processes import Forked, held_command_line, start, wait_until

BATCHES = 5
MORE = TINY_RECIPE.replace("images_per_class: 6", "images_per_class: 14")  # 5 batches of 8 an epoch
CLIP, DECAY = 2.0, 0.8
OPTIONS = f"accumulate: 2, clip_grad_norm: {CLIP}, ema: {DECAY}"
ACCUMULATED = MORE.replace("epochs: 3", f"epochs: 3, {OPTIONS}") + "schedule: {name: cosine}\n"


def naive(recipe: Recipe, unreadable: Sequence[int] = ()) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """What train must do, written out with nothing but torch and the parts; images that cannot be read are left out.

    Return the weights with their averages, the mean loss of the steps of each epoch, and the rate of each step.
    """
    settings, train, decay = recipe.training, recipe.dataset.build("train"), recipe.training.ema or 0.0
    torch.manual_seed(recipe.seed)
    model = build_model(recipe)
    loss = ProxyAnchor(model.manifold, len(train.class_names))
    optimizer = torch.optim.AdamW(
        [{"params": model.parameters()}, {"params": [loss.proxies], "lr": 0.03}], lr=0.003, weight_decay=1e-4
    )
    averages = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    mixed = torch.autocast("cpu", torch.bfloat16) if settings.precision == "bf16" else nullcontext()
    sampler = recipe.sampler.build(train.labels, recipe.seed)
    mean_losses: list[float] = []
    rates: list[float] = []
    for epoch in range(settings.epochs):
        batches = [[row for row in batch if row not in unreadable] for batch in sampler.batches(epoch)]
        groups = [batches[first : first + settings.accumulate] for first in range(0, len(batches), settings.accumulate)]
        steps: list[float] = []
        for step, group in enumerate(groups):
            share = (epoch + step / len(groups)) / settings.epochs
            rates.append(0.003 * ((1 + cos(pi * share)) / 2 if recipe.schedule.name == "cosine" else 1))
            optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rates[-1], 10 * rates[-1]
            losses: list[torch.Tensor] = []
            for batch in filter(None, group):
                with mixed:
                    embeddings = model(torch.stack([train.sample(row) for row in batch]))
                losses.append(loss(embeddings.float(), train.labels[batch]))
            if not losses:
                continue
            mean = torch.stack(losses).mean()
            optimizer.zero_grad()
            mean.backward()
            if settings.clip_grad_norm:
                torch.nn.utils.clip_grad_norm_([*model.parameters(), loss.proxies], settings.clip_grad_norm)
            optimizer.step()
            for name, weight in model.named_parameters():
                averages[name] = decay * averages[name] + (1 - decay) * weight.detach()
            steps.append(mean.item())
        mean_losses.append(sum(steps) / len(steps))
    return {**model.state_dict(), **averages, "proxies": loss.proxies.detach()}, mean_losses, rates


@pytest.mark.parametrize(
    ("text", "precision", "tolerance"),
    [
        (TINY_RECIPE, "fp32", {}),
        (ACCUMULATED, "fp32", {"rtol": 1e-4, "atol": 1e-5}),
        (ACCUMULATED, "bf16", {"rtol": 1e-4, "atol": 1e-5}),
    ],
    ids=["plain", "accumulated", "accumulated in bf16"],
)
def test_training_is_that_of_a_naive_loop(
    dmlkit, tmp_path: Path, text: str, precision: str, tolerance: dict[str, float]
):
    """Also with steps of several batches, of which the last of an epoch has one, clipped gradients and averages."""
    (tmp_path / "recipe.yaml").write_text(text)
    sets = ("--set", f"training.precision={precision}", "--device", "cpu")
    dmlkit("train", tmp_path / "recipe.yaml", "-o", tmp_path / "run", *sets).ok()
    saved, rows = RunFolder(tmp_path / "run").load_checkpoint("last"), RunFolder(tmp_path / "run").read_metrics()
    found = {**saved["model"], "proxies": saved["objective"]["loss.proxies"]}
    expected, losses, rates = naive(parse_recipe(text, "r.yaml", [f"training.precision={precision}"]))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name, **tolerance)
    assert [row.loss for row in rows] == pytest.approx(losses, rel=1e-5)
    steps = len(rates) // 3
    assert [row.lr for row in rows] == pytest.approx(rates[steps - 1 :: steps])


def test_scaled_gradients_are_clipped_by_norm_and_value_as_unscaled_ones_are():
    """As float16 needs on a GPU; a step whose gradients overflow changes nothing. A scale of 2^k does not round."""
    clipped = f"epochs: 3, clip_grad_norm: {CLIP}, clip_grad_value: 0.01"
    recipe = parse_recipe(TINY_RECIPE.replace("epochs: 3", clipped), "r.yaml")
    found: list[list[torch.Tensor]] = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        experiment, ranks = assemble(recipe), Ranks(torch.device("cpu"), scaler=scaler)
        weights = [*experiment.model.parameters(), *experiment.objective.parameters()]
        images, labels = torch.stack([experiment.train.sample(row) for row in range(12)]), experiment.train.labels[:12]
        for factor in (1.0, float("inf"))[: 1 if scaler is None else 2]:
            loss = experiment.objective(ranks.compute(experiment.model, images), labels, torch.arange(12))
            ranks.backward(factor * loss)
            take_step(ranks, experiment, 1, [0.01] * len(experiment.optimizer.param_groups))
        found.append([weight.detach() for weight in weights])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not torch.equal(found[0][0], next(assemble(recipe).model.parameters()))


@pytest.mark.parametrize(("loss", "is_mean_over_images"), [("norm_softmax", True), ("proxy_anchor", False)])
def test_two_small_batches_are_one_large_one_only_where_a_loss_is_a_mean_over_images(
    tmp_path: Path, loss: str, is_mean_over_images: bool
):
    text = MORE.replace("proxy_anchor", loss).replace("width: 4", "width: 4, freeze_batchnorm_statistics: true")
    text = text.replace("optimizer: {name: adamw, lr: 0.003", "optimizer: {name: riemannian_sgd, lr: 0.01")
    halved = text.replace("batch_size: 8", "batch_size: 4").replace("epochs: 3", "epochs: 3, accumulate: 2")
    found: list[dict[str, torch.Tensor]] = []
    for name, recipe in (("large", text), ("small", halved)):
        library.train(parse_recipe(recipe, "r.yaml"), tmp_path / name, device="cpu")
        found.append(RunFolder(tmp_path / name).load_checkpoint("last")["model"])
    large, small = (torch.cat([weight.flatten() for weight in model.values()]) for model in found)
    apart = ((small - large).norm() / large.norm()).item()
    assert apart < 1e-5 if is_mean_over_images else apart > 1e-3


def assert_same_bits(whole: Path, cut: Path):
    """Of the average, of where the last step left the weights, and of the loss."""
    first, second = (RunFolder(run).load_checkpoint("last") for run in (whole, cut))
    for part in ("model", "latest", "objective"):
        assert first[part] and first[part].keys() == second[part].keys()
        for name, tensor in first[part].items():
            assert torch.equal(tensor, second[part][name]), name
    assert any(not torch.equal(first["model"][name], weight) for name, weight in first["latest"].items())


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_interrupted_between_two_steps_ends_with_the_same_bits(number: signal.Signals, tmp_path: Path):
    recipe, marks, cut = tmp_path / "accumulated.yaml", tmp_path / "marks", tmp_path / "cut"
    recipe.write_text(ACCUMULATED.replace("name: proxy_anchor", "name: proxy_isa, delay: 0.5"))
    marks.mkdir()
    words = ("train", recipe, "--device", "cpu", "-o")
    whole = start(*words, tmp_path / "whole")
    assert whole.wait(END) == 0, whole.communicate()[0]
    second = 6  # step of the second epoch: an epoch has 3, and its end counts too
    process = Forked(held_command_line, second, str(marks), *map(str, words), str(cut))
    wait_until(lambda: any(marks.iterdir()), process)
    process.send_signal(number)
    output = process.communicate()[0]
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), output
    stopped = RunFolder(cut).load_checkpoint("last")
    assert (stopped["epoch"], stopped["step"]) == ((1, 0) if number == signal.SIGKILL else (1, 2))
    resumed = start(*words, cut, "--resume")
    assert resumed.wait(END) == 0, resumed.communicate()[0]
    assert_same_bits(tmp_path / "whole", cut)


def test_batches_that_cannot_be_read_are_left_out_of_the_mean(tmp_path: Path):
    random, photos = np.random.default_rng(0), tmp_path / "photos"
    for label in ("ant", "bee", "cat", "dog"):  # the last two are test classes
        (photos / label).mkdir(parents=True)
        for number in range(4):
            pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(photos / label / f"{number}.png")
    broken = {photos / "ant" / "0.png", photos / "ant" / "1.png", photos / "bee" / "2.png"}
    for path in broken:
        path.write_bytes(b"broken")
    text = "\n".join(line for line in TINY_RECIPE.splitlines() if not line.startswith("dataset"))
    text = text.replace("batch_size: 8", "batch_size: 1").replace("epochs: 3", "epochs: 4, accumulate: 2")
    dataset = f"{{name: folder, root: {photos}, validation_fraction: 0, on_bad_image: skip}}"
    recipe = parse_recipe(f"{text}\ndataset: {dataset}", "r.yaml")
    library.train(recipe, tmp_path / "run", device="cpu")
    found = RunFolder(tmp_path / "run").load_checkpoint("last")["model"]

    images = recipe.dataset.build("train")
    unreadable = [row for row in range(len(images)) if photos / images.key(row) in broken]
    sampler = recipe.sampler.build(images.labels, recipe.seed)
    rows = [row for epoch in range(4) for batch in sampler.batches(epoch) for row in batch]
    lost = [sum(row in unreadable for row in rows[first : first + 2]) for first in range(0, len(rows), 2)]
    assert set(lost) == {0, 1, 2}
    for name, tensor in naive(recipe, unreadable)[0].items():
        if name != "proxies":
            torch.testing.assert_close(found[name], tensor, msg=name, rtol=1e-4, atol=1e-5)


def test_validation_judges_the_average(trained_once: Callable[..., Path], tmp_path: Path):
    run = trained_once(tmp_path, TINY_RECIPE.replace("epochs: 3", f"epochs: 3, ema: {DECAY}"))
    reported = RunFolder(run).read_metrics()[-1].validation
    measured = library.evaluate(run, split="validation", checkpoint="last", device="cpu").report.metrics
    assert {name: measured[name] for name in reported} == pytest.approx(reported, abs=1e-6)


def test_more_batches_than_an_epoch_has_are_one_line(dmlkit, tmp_path: Path):
    recipe = tmp_path / "more.yaml"
    recipe.write_text(MORE)
    message = "training.accumulate: got 6, expected at most 5, the number of batches per epoch"
    words = ("train", recipe, "-o", tmp_path / "run", "--set", "training.accumulate=6")
    dmlkit(*words).refused(f"error: --set training.accumulate=6: {message}")
    assert not (tmp_path / "run").exists()
    assert assemble(parse_recipe(MORE, "r.yaml", [f"training.accumulate={BATCHES}"])).steps == 1
