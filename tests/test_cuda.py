"""What a CUDA GPU computes, beside the CPU; `make test-gpu` runs it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from torch.profiler import ProfilerActivity, profile

from dmlkit.losses.base import LossConfig
from dmlkit.manifolds import Sphere
from dmlkit.metrics import retrieval_metrics
from tests.conftest import TINY_RECIPE

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA GPU here"),
    pytest.mark.filterwarnings("ignore:ProxyGML"),  # k < N at a few classes
]
EVERY_LOSS = pytest.mark.parametrize("name", sorted(LossConfig.variants))
CLASSES, DIM = 30, 16


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    points = normalize(torch.randn(24, DIM, generator=torch.Generator().manual_seed(0)), dim=1)
    return points.to(device).requires_grad_(), (torch.arange(24) // 3).to(device)


@EVERY_LOSS
def test_value_and_gradient_are_the_cpus(name: str):
    if name == "margin":
        pytest.skip("draws its pairs with the device's generator")
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(1)
        loss = LossConfig.variants[name]().build(Sphere(DIM), CLASSES).to(device)
        points, labels = batch(device)
        torch.manual_seed(2)
        value = loss(points, labels)
        value.backward()
        gradients = [points.grad, *(parameter.grad for parameter in loss.parameters())]
        results.append([value.detach().cpu(), *(part.cpu() for part in gradients if part is not None)])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@EVERY_LOSS
def test_a_step_copies_nothing_to_the_host(name: str):
    loss = LossConfig.variants[name]().build(Sphere(DIM), CLASSES).to("cuda")
    points, labels = batch("cuda")
    optimizer = torch.optim.AdamW([points, *loss.parameters()], fused=True)
    loss.set_epoch(3)

    def step() -> None:
        optimizer.zero_grad()
        loss(points, labels).backward()
        optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    copies = [event.name for event in profiler.events() if "DtoH" in event.name]
    assert copies == []


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_trains_resumes_and_is_evaluated(dmlkit, tmp_path: Path, precision: str):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(TINY_RECIPE)
    run, sets = tmp_path / "run", ["--set", f"training.precision={precision}", "--set", "training.clip_grad_norm=10"]
    result = dmlkit("train", recipe, "-o", run, "--device", "cuda", *sets)
    assert result.code == 0, result.err
    before = json.loads((run / "summary.json").read_text())
    assert dmlkit("train", recipe, "-o", run, "--device", "cuda", "--resume", *sets).code == 0
    assert json.loads((run / "summary.json").read_text())["last"] == before["last"]
    scores = []
    for device in ("cpu", "cuda"):
        result = dmlkit("eval", run, "--device", device, "--json")
        assert result.code == 0, result.err
        scores.append(json.loads(result.out)["metrics"])
    assert scores[1] == pytest.approx(scores[0], abs=0.05)


def test_images_augmented_there_are_the_loaders(dmlkit, tmp_path: Path):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(TINY_RECIPE)
    sets = ["--set", "training.epochs=1", "--set", "transform={name: imagenet, size: 16, resize: 16}"]
    losses = []
    for where in ("loader", "device"):
        run = tmp_path / where
        result = dmlkit("train", recipe, "-o", run, "--device", "cuda", *sets, "--set", f"training.augment_on={where}")
        assert result.code == 0, result.err
        losses.append(json.loads((run / "metrics.jsonl").read_text())["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.005)
    assert losses[1] != losses[0]  # it rounds elsewhere


@pytest.mark.parametrize("manifold", ["euclidean", "sphere", "poincare", "lorentz"])
def test_embeddings_distances_and_searches_are_the_cpus(dmlkit, tmp_path: Path, manifold: str):
    recipe, run = tmp_path / "tiny.yaml", tmp_path / "run"
    recipe.write_text(TINY_RECIPE + f"manifold: {{name: {manifold}}}\n")
    result = dmlkit("train", recipe, "-o", run, "--device", "cuda", "--set", "training.epochs=2")
    assert result.code == 0, result.err
    points, found = [], []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        result = dmlkit("embed", run, "--split", "test", "-o", folder, "--device", device)
        assert result.code == 0, result.err
        points.append(torch.from_numpy(np.load(folder / "embeddings.npy")))
        result = dmlkit("search", folder, folder, "-k", "3", "--device", device, "--json")
        assert result.code == 0, result.err
        found.append([[one["id"] for one in query["neighbors"]] for query in json.loads(result.out)["queries"]])
    torch.testing.assert_close(points[1], points[0], rtol=5e-3, atol=2e-3)  # the GPU convolves in TF32
    same = sum(mine == theirs for mine, theirs in zip(*found, strict=True))
    assert same >= 0.8 * len(found[0])


def test_metrics_are_the_cpus():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3000) // 10
    points = normalize(torch.randn(300, 32, generator=generator)[labels] + torch.randn(3000, 32, generator=generator))
    names = ["recall@1", "recall@10", "map@r", "r_precision", "ndcg@10"]
    found, expected = (retrieval_metrics(points.to(device), labels, metrics=names) for device in ("cuda", "cpu"))
    assert found == pytest.approx(expected, abs=1e-4)
