"""Results of a CUDA GPU compared with those of the CPU; `make test-gpu` runs it.

Without a GPU the CPU takes its place, of tests that train in one case, so that they do not rot between two runs on one.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize
from torch.profiler import ProfilerActivity, profile

from dmlkit.losses.base import Loss, LossConfig
from dmlkit.metrics import retrieval_metrics
from dmlkit.testing.promise import fitting_manifolds
from tests.conftest import TINY_RECIPE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU_ALONE = pytest.mark.skipif(DEVICE == "cpu", reason="torch finds no CUDA GPU here")
pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore:ProxyGML")]  # k < N at a few classes
EVERY_LOSS = pytest.mark.parametrize("name", sorted(LossConfig.variants))
CLASSES, DIM = 30, 16


def batch(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    features = normalize(torch.randn(24, DIM, generator=torch.Generator().manual_seed(0)), dim=1)
    return features.to(device).requires_grad_(), (torch.arange(24) // 3).to(device)


def loss_named(name: str) -> Loss:
    """On the sphere, or on the first manifold that it takes."""
    config = LossConfig.variants[name]()
    return config.build(fitting_manifolds(config)[0].build(DIM), CLASSES)


@EVERY_LOSS
def test_value_and_gradient_are_the_cpus(name: str):
    if name == "margin":
        pytest.skip("draws its pairs with the device's generator")
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(1)
        loss = loss_named(name).to(device)
        features, labels = batch(device)
        torch.manual_seed(2)
        value = loss(loss.manifold.from_features(features), labels)
        value.backward()
        gradients = [features.grad, *(parameter.grad for parameter in loss.parameters())]
        results.append([value.detach().cpu(), *(part.cpu() for part in gradients if part is not None)])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@ON_GPU_ALONE
@EVERY_LOSS
def test_a_step_copies_nothing_to_the_host(name: str):
    loss = loss_named(name).to(DEVICE)
    features, labels = batch(DEVICE)
    optimizer = torch.optim.AdamW([features, *loss.parameters()], fused=True)
    loss.set_epoch(3)

    def step() -> None:
        optimizer.zero_grad()
        loss(loss.manifold.from_features(features), labels).backward()
        optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    assert [event.name for event in profiler.events() if "DtoH" in event.name] == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", *(pytest.param(one, marks=ON_GPU_ALONE) for one in ("fp32", "fp16"))])
def test_a_run_trains_resumes_and_is_evaluated(dmlkit, tmp_path: Path, precision: str):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(TINY_RECIPE)
    run, sets = tmp_path / "run", ["--set", f"training.precision={precision}", "--set", "training.clip_grad_norm=10"]
    dmlkit("train", recipe, "-o", run, "--device", DEVICE, *sets).ok()
    before = json.loads((run / "summary.json").read_text())
    assert dmlkit("train", recipe, "-o", run, "--device", DEVICE, "--resume", *sets).code == 0
    assert json.loads((run / "summary.json").read_text())["last"] == before["last"]
    scores = []
    for device in ("cpu", DEVICE):
        scores.append(json.loads(dmlkit("eval", run, "--device", device, "--json").ok().out)["metrics"])
    assert scores[1] == pytest.approx(scores[0], abs=0.05)


MANIFOLDS = ("euclidean", "sphere", "poincare")


@pytest.mark.slow
@pytest.mark.parametrize("manifold", ["lorentz", *(pytest.param(one, marks=ON_GPU_ALONE) for one in MANIFOLDS)])
def test_embeddings_distances_and_searches_are_the_cpus(dmlkit, tmp_path: Path, manifold: str):
    recipe, run = tmp_path / "tiny.yaml", tmp_path / "run"
    recipe.write_text(TINY_RECIPE + f"manifold: {{name: {manifold}}}\n")
    dmlkit("train", recipe, "-o", run, "--device", DEVICE, "--set", "training.epochs=2").ok()
    points, found = [], []
    for number, device in enumerate(("cpu", DEVICE)):
        folder = tmp_path / str(number)
        dmlkit("embed", run, "--split", "test", "-o", folder, "--device", device).ok()
        points.append(torch.from_numpy(np.load(folder / "embeddings.npy")))
        result = dmlkit("search", folder, folder, "-k", "3", "--json").ok()
        found.append(
            [[neighbor["id"] for neighbor in query["neighbors"]] for query in json.loads(result.out)["queries"]]
        )
    torch.testing.assert_close(points[1], points[0], rtol=5e-3, atol=2e-3)  # the GPU convolves in TF32
    assert sum(mine == theirs for mine, theirs in zip(*found, strict=True)) >= 0.8 * len(found[0])


def test_metrics_are_the_cpus():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(3000) // 10
    points = normalize(torch.randn(300, 32, generator=generator)[labels] + torch.randn(3000, 32, generator=generator))
    names = ["recall@1", "recall@10", "map@r", "r_precision", "ndcg@10"]
    found, expected = (retrieval_metrics(points.to(device), labels, metrics=names) for device in (DEVICE, "cpu"))
    assert found == pytest.approx(expected, abs=1e-4)
