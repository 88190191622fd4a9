"""Engines of embeddings, against torch in float32, NumPy, and engines whose speed and agreement are made up."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dmlkit as face
from dmlkit.distributed.launch import start_ranks
from dmlkit.vectors import computation
from dmlkit.vectors.computation import _remove_oldest as remove_oldest
from dmlkit.vectors.embedder import Embedder
from dmlkit.vectors.manifest import Computation
from tests.conftest import Cli, refuses
from tests.datasets import trees


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A trained run in ``run``, and 12 pictures in ``pictures``."""
    folder = tmp_path_factory.mktemp("engines")
    trained_once(folder)
    trees.photos(folder / "pictures", (f"{index:02}.png" for index in range(12)))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def in_own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def model_of(home: Path, engine: str) -> Embedder:
    return face.load(str(home / "run"), device=f"cpu{engine}")


def pictures(home: Path) -> list[Path]:
    return sorted((home / "pictures").iterdir())


def made_up(monkeypatch: pytest.MonkeyPatch, **of: tuple[float, int]) -> None:
    """Let a comparison find the cosine and the number of same neighbors of an engine."""

    def prepared(trained: computation.TrainedModel, engine: str, _: str) -> Any:
        cosine, same = of[engine]
        way = {"precision": "bf16", "engine": "torch"} if engine == "bf16" else {"precision": "fp32", "engine": engine}
        agreement = Computation(**way, images=64, cosine=cosine, same_nearest=same)  # pyright: ignore[reportArgumentType]
        fingerprint = trained.model.fingerprint()
        return trained.model, computation.EngineComparison(computation=agreement, fingerprint=fingerprint)

    monkeypatch.setattr(computation, "_prepare", prepared)
    monkeypatch.setattr(computation, "_computes_bf16", lambda _: "bf16" in of)


def test_graphs_give_torch_s_embeddings_and_the_manifest_names_the_runtime(home: Path, tmp_path: Path, dmlkit: Cli):
    engine = "onnxruntime"
    pytest.importorskip(engine, reason="it comes with an extra of dmlkit")
    options = ("embed", home / "run", home / "pictures", "-o")
    assert dmlkit(*options, tmp_path / "torch", "--device", "cpu").code == 0
    dmlkit(*options, tmp_path / engine, "--device", f"cpu+{engine}").ok()
    torch_s, theirs = (np.load(tmp_path / name / "embeddings.npy") for name in ("torch", engine))
    np.testing.assert_allclose(theirs, torch_s, atol=1e-5)
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("torch", engine)]
    assert manifests[0]["computation"] is None
    found = manifests[1]["computation"]
    assert (found["engine"], found["precision"]) == (engine, "fp32") and found["cosine"] > 0.99999
    assert manifests[0]["model"] == manifests[1]["model"]
    # they agree, so that one searches in the other
    assert dmlkit("search", tmp_path / engine, home / "pictures", "--device", "cpu").code == 0
    assert dmlkit("search", tmp_path / "torch", home / "pictures", "--device", f"cpu+{engine}").code == 0


def test_a_graph_that_is_kept_embeds_without_building_the_network(home, monkeypatch, cache):
    pytest.importorskip("onnxruntime", reason="it comes with an extra of dmlkit")
    first = model_of(home, "+onnxruntime")
    expected = first.embed(pictures(home))
    with monkeypatch.context() as patch:
        patch.setattr("dmlkit.vectors.trained.build_model", None)
        second = model_of(home, "+onnxruntime")
        np.testing.assert_array_equal(second.embed(pictures(home)), expected)
        assert second.trained.fingerprint == first.trained.fingerprint == model_of_weights(home)
        with pytest.raises(TypeError, match="not callable"):
            model_of(home, "").embed(pictures(home))
    (graph,) = (cache / "dmlkit").glob("engine-*-onnxruntime.onnx")
    graph.write_bytes(b"of another run")
    np.testing.assert_array_equal(model_of(home, "+onnxruntime").embed(pictures(home)), expected)
    assert graph.stat().st_size > 1000


def model_of_weights(home: Path) -> str:
    """Fingerprint of the network in torch, by hashing its weights here."""
    digest, state = hashlib.sha256(), torch.load(home / "run" / "checkpoints" / "last.pt", weights_only=True)
    for name, tensor in sorted(state["model"].items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def test_agreement_is_that_of_the_training_images(home: Path):
    """Cosines and nearest images, computed by NumPy one image at a time from what the Python face returns."""
    exact, near = model_of(home, ""), model_of(home, "+bf16")
    found = near.trained.computation
    assert found is not None and found.precision == "bf16"
    images = exact.trained.recipe.dataset.build("train")
    rows = sorted({round(row) for row in np.linspace(0, len(images) - 1, 64)})
    arrays = [images.sample(row).permute(1, 2, 0).numpy() for row in rows]
    points, theirs = (model.embed(arrays).astype(np.float64) for model in (exact, near))
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(points, theirs, strict=True)]
    assert found.images == len(rows) and found.cosine == pytest.approx(min(cosines), abs=1e-5)
    same = 0
    for row in range(len(rows)):
        nearest: list[set[int]] = []
        for table in (points, theirs):
            order = sorted(
                (column for column in range(len(rows)) if column != row), key=lambda c: -table[row] @ table[c]
            )
            nearest.append(set(order[:10]))
        same += nearest[0] == nearest[1]
    assert abs(found.same_nearest - same) <= 2  # batches of other sizes round otherwise


def test_embeddings_that_do_not_agree_are_those_of_another_model(home, monkeypatch, tmp_path, caplog, dmlkit):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made_up(monkeypatch, bf16=(0.99, 64))
    options = ("embed", home / "run", home / "pictures", "-o")
    assert dmlkit(*options, tmp_path / "torch", "--device", "cpu").code == 0
    assert dmlkit(*options, tmp_path / "bf16", "--device", "cpu+bf16").code == 0
    assert "least cosine to torch 0.990000" in caplog.text
    models = [json.loads((tmp_path / name / "manifest.json").read_text())["model"] for name in ("torch", "bf16")]
    assert models[0]["fingerprint"] != models[1]["fingerprint"]
    assert dmlkit("search", tmp_path / "bf16", home / "pictures", "--device", "cpu+bf16").code == 0
    for folder, device, way in (("bf16", "cpu", "add +bf16"), ("torch", "cpu+bf16", "without a runtime")):
        result = dmlkit("search", tmp_path / folder, home / "pictures", "--device", device)
        assert result.code == 2 and "do not agree" in result.err and way in result.err


@pytest.mark.parametrize(
    ("onnxruntime", "bf16", "taken"),
    [
        ((1.0, 64), (1.0, 64), "+onnxruntime"),
        ((0.9999, 64), None, "+onnxruntime"),
        ((0.9998, 64), (0.9999, 64), "+bf16"),  # a cosine below the agreement
        ((1.0, 63), (1.0, 64), "+bf16"),  # another nearest image
        ((float("-1"), 0), (0.5, 64), ""),
        ((0.5, 64), None, ""),  # a processor that emulates bfloat16
    ],
)
def test_fastest_is_the_first_that_agrees(home, monkeypatch, caplog, onnxruntime, bf16, taken):
    made_up(monkeypatch, onnxruntime=onnxruntime, **({"bf16": bf16} if bf16 else {}))
    found = model_of(home, "+fastest").trained.computation
    assert (found.option if found else "") == taken
    rejected = 0 if taken == "+onnxruntime" else 1 if taken or not bf16 else 2
    assert caplog.text.count("is not used: least cosine to torch") == rejected


def test_a_run_keeps_the_points_of_each_engine_apart(home: Path, dmlkit: Cli):
    for device in ("cpu+bf16", "cpu"):
        assert dmlkit("embed", home / "run", "--split", "test", "--device", device).code == 0
    devices = [json.loads(path.read_text())["device"] for path in (home / "run").glob("vectors/*/model.json")]
    assert {"cpu", "cpu+bf16"} <= {*devices} and len(devices) == len({*devices})


def test_engines_that_cannot_be_used_say_why(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dmlkit: Cli):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = r"expected cpu\+bf16, cpu\+onnxruntime, cpu\+fastest or cpu$"
    for device in ("cpu+tensorrt", "cpu+bf16+bf16"):
        refuses(expected, start_ranks, device)
    refuses(r"--device cpu\+: expected", start_ranks, "cpu+")
    expected = r"--device cpu\+bf16: expected auto, cpu, cuda, cuda:N or mps"
    refuses(expected, start_ranks, "cpu+bf16", "fp32")  # a training
    dmlkit("eval", home / "run", "--device", "cpu+bf16").refused("use --device cpu")

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxscript", None)
        refuses(r"\+onnxruntime needs onnxscript; .*dmlkit\[onnx\]", model_of, home, "+onnxruntime")
        patch.setattr(computation, "_computes_bf16", lambda _: False)
        assert model_of(home, "+fastest").trained.computation is None  # without the package torch computes


def test_a_graph_that_another_process_removes_meanwhile_stops_nothing(tmp_path: Path):
    for number in range(10):
        (tmp_path / f"engine-{number}.onnx").touch()
        os.utime(tmp_path / f"engine-{number}.onnx", (number, number))
    (tmp_path / "engine-gone.onnx").symlink_to(tmp_path / "nothing")  # listed, but without a file
    remove_oldest(tmp_path / "engine-9.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {f"engine-{number}.onnx" for number in range(2, 10)}
