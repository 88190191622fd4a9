"""Exports in a lower precision: read by onnxruntime and onnx alone, and compared with the embeddings of the run."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dmlkit as package
from dmlkit.datasets.table import TableConfig
from dmlkit.distributed.launch import start_ranks
from dmlkit.errors import UserError
from dmlkit.export import precision as precision_module
from dmlkit.export.precision import lower, to_fp16, to_int8
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.trained import load_model
from tests.conftest import ON_THE_BALL, TINY_RECIPE, Cli, refuses

onnx: Any = pytest.importorskip("onnx", reason="it comes with the extra dmlkit[onnx]")
onnxruntime: Any = pytest.importorskip("onnxruntime", reason="it comes with the extra dmlkit[onnx]")


@pytest.fixture(scope="module")
def run(trained_once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    wider = TINY_RECIPE.replace("width: 4", "width: 16").replace("epochs: 3", "epochs: 3, workers: 0")
    return trained_once(tmp_path_factory.mktemp("precision"), wider)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def map_at_r(points: np.ndarray, labels: np.ndarray) -> float:
    """MAP@R by a loop over the queries."""
    found: list[float] = []
    for row, label in enumerate(labels):
        others = np.flatnonzero(np.arange(len(labels)) != row)
        size = int((labels[others] == label).sum())
        hits = labels[others[np.argsort(-(points[others] @ points[row]), kind="stable")][:size]] == label
        found.append(float((hits * np.cumsum(hits) / np.arange(1, size + 1)).sum() / size))
    return float(np.mean(found))


def traced_before(monkeypatch: pytest.MonkeyPatch, graph: Any) -> None:
    """Let the network have been traced, with this graph."""
    monkeypatch.setattr("dmlkit.export.precision.traced", lambda *_: None)
    monkeypatch.setattr("dmlkit.export.precision.onnx_program", lambda *_: SimpleNamespace(model_proto=graph))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "kind"), [("int8", onnx.TensorProto.UINT8), ("fp16", onnx.TensorProto.FLOAT16)])
def test_the_file_is_smaller_and_what_was_reported(run: Path, precision: str, kind: int, dmlkit: Cli):
    result = dmlkit("export", run, "--format", "onnx", "--precision", precision)
    assert (result.code, result.err) == (0, "")
    path = run / "exports" / f"model.{precision}.onnx"
    weights = [one for one in onnx.load(path).graph.initializer if len(one.dims) in (2, 4)]
    sizes = {one.name: (one.data_type == kind, int(np.prod(one.dims))) for one in weights}
    assert sum(size for is_lower, size in sizes.values() if is_lower) >= 0.95 * sum(size for _, size in sizes.values())
    session = onnxruntime.InferenceSession(path)
    dataset = RunFolder(run).recipe().dataset.build("validation")
    images = [dataset.sample(row).permute(1, 2, 0).numpy() for row in range(len(dataset))]
    points = np.concatenate([session.run(None, {"images": image[None]})[0] for image in images])
    own = package.load(run, device="cpu").embed(images)
    assert cosines(points, own).min() > (0.98 if precision == "int8" else 0.99999)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1, atol=1e-6)  # the map to the sphere is in float32
    # what the command said of them
    said = re.search(r"map@r ([\d.]+), fp32 ([\d.]+) on (\d+) validation images; ([\d.]+) of the size", result.out)
    assert said, result.out
    labels = dataset.labels.numpy()
    assert float(said[1]) == pytest.approx(map_at_r(points, labels), abs=2e-4)
    assert float(said[2]) == pytest.approx(map_at_r(own, labels), abs=2e-4) and int(said[3]) == len(dataset)
    manifest = json.loads(path.with_name(f"{path.name}.json").read_text())
    assert manifest["computation"]["precision"] == precision and manifest["computation"]["images"] > 10
    scores = manifest["validation"]
    assert (scores["metric"], scores["images"]) == ("map@r", len(dataset))
    assert f"{scores['lowered']:.4f}" == said[1] and f"{scores['fp32']:.4f}" == said[2]
    assert manifest["parity"]["largest_difference"] <= 1e-4  # with resizing and crop, or without
    agrees = manifest["computation"]["cosine"] >= 0.9999 and "another model" not in result.out
    own_fingerprint = package.load(run, device="cpu").trained.fingerprint
    assert (manifest["model"]["fingerprint"] == own_fingerprint) == agrees


@pytest.mark.slow
def test_a_tracker_gives_floats_to_a_smaller_file(run: Path, tmp_path: Path, dmlkit: Cli):
    path = tmp_path / "tracker.onnx"
    words = ("--format", "onnx", "--precision", "int8", "--input", "tracker", "-o", path)
    assert dmlkit("export", run, *words).code == 0
    assert json.loads(Path(f"{path}.json").read_text())["input"] == "images: float32 RGB (batch, 3, 16, 16), in 0..1"
    dataset = RunFolder(run).recipe().dataset.build("test")
    images = torch.stack([dataset.sample(row) for row in range(8)])
    points = onnxruntime.InferenceSession(path).run(None, {"images": images.numpy().astype(np.float32) / 255})[0]
    own = package.load(run, device="cpu").embed([image.permute(1, 2, 0).numpy() for image in images])
    assert cosines(points, own).min() > 0.98


@pytest.mark.slow
def test_points_of_a_curved_space_are_on_it(trained_once: Callable[..., Path], tmp_path: Path, monkeypatch):
    run = RunFolder(trained_once(tmp_path, ON_THE_BALL))
    ranks = start_ranks("cpu")
    trained = load_model(run, ranks)
    lowered = lower(run, trained, "int8", ranks)
    points = lowered.trained.model(torch.randint(0, 256, (8, 3, 16, 16), dtype=torch.uint8))
    assert float(points.norm(dim=1).max()) < 1 and trained.manifold.distance_off(points).max() <= 1e-5

    def outside(*_: object) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda batch: 2 + torch.zeros(len(batch), 4)

    monkeypatch.setattr("dmlkit.export.precision.onnx_session", outside)
    traced_before(monkeypatch, lowered.graph)
    monkeypatch.setattr("dmlkit.export.precision.to_int8", lambda *_: lowered.graph)
    with pytest.raises(UserError, match=r"--precision int8: training image 0: .* too coarse for .* \(poincare\)"):
        lower(run, trained, "int8", ranks)


@pytest.mark.slow
def test_a_terminal_shows_that_a_network_is_traced(run: Path, tmp_path: Path, monkeypatch, dmlkit: Cli):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    result = dmlkit("export", run, "--format", "torch-export", "--input", "squares", "-o", tmp_path / "model.pt2")
    assert result.code == 0 and "tracing the model, which can take minutes" in result.err


def test_what_cannot_be_converted_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch, dmlkit: Cli):
    def refused(*options: object) -> str:
        return dmlkit("export", run, *options).refused().err

    nothing = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 18]> g (float[1, 3] x) => (float[1, 3] y) {y = Relu(x)}'
    )
    refuses("has no layer that onnxruntime quantizes", to_int8, nothing, "x", torch.zeros(2, 3))
    refuses("has no weighted layer", to_fp16, nothing)

    def fail(*_: object) -> None:
        raise ValueError("operator Foo is unknown\nand more")

    traced_before(monkeypatch, nothing)
    monkeypatch.setattr("dmlkit.export.precision.to_int8", fail)
    message = refused("--format", "onnx", "--precision", "int8")
    assert "onnxruntime cannot convert this model (operator Foo is unknown); use --precision fp32" in message
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # an import fails as if it were not installed
    message = refused("--format", "onnx", "--precision", "int8")
    assert "--precision int8 needs onnxruntime; install it with: pip install 'dmlkit[onnx]'" in message


def test_validation_images_of_known_classes_search_the_training_images(files: Path):
    paths = sorted((files / "photos").glob("*/*.png"))
    (files / "list.csv").write_text("\n".join(["path,label", *(f"{path},{path.parent.name}" for path in paths)]))
    images = TableConfig(file=str(files / "list.csv"), root="/", split="images", validation_fraction=0.3)
    trained = load_model(RunFolder(files / "run"), ranks := start_ranks("cpu"))
    trained = replace(trained, recipe=trained.recipe.model_copy(update={"dataset": images}), run=None)
    scores = precision_module._validation_scores(RunFolder(files / "run"), trained, trained, ranks)
    assert scores is not None
    queries, gallery = images.build("validation"), images.build("train")
    model = package.load(files / "run", device="cpu")
    asked, points = (model.embed([*part.paths]) for part in (queries, gallery))
    labels, others = ([Path(path).parent.name for path in part.paths] for part in (queries, gallery))
    precisions = list[float]()
    for point, label in zip(asked, labels, strict=True):
        size = others.count(label)
        hits = np.array([others[row] == label for row in (-(points @ point)).argsort()[:size]])
        precisions.append(float((hits * hits.cumsum() / np.arange(1, size + 1)).sum() / size))
    assert scores.images == len(queries) < len(gallery)
    assert scores.fp32 == scores.lowered == pytest.approx(np.mean(precisions), abs=1e-6)
