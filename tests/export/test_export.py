"""Embeddings and exports: what other programs read equals what the model computes."""

import json
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from pyarrow import parquet

from dmlkit.backbones.small_cnn import SmallCNN
from dmlkit.distributed.launch import start_ranks
from dmlkit.export.export import export
from dmlkit.export.model import ModelManifest
from dmlkit.export.wanted import WantedModel
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.manifest import Description
from dmlkit.vectors.trained import load_model
from tests.conftest import ROOT, refuses
from tests.vectors.stored import EUCLIDEAN, embeddings_at


@pytest.fixture(scope="module")
def run(tmp_path_factory, trained_once) -> Path:
    return trained_once(tmp_path_factory.mktemp("trained"))


def expected_embeddings(run: Path) -> tuple[np.ndarray, list[str], list[str]]:
    """One image at a time, straight through the model."""
    trained = load_model(RunFolder(run), start_ranks("cpu"))
    dataset = trained.recipe.dataset.build("test")
    with torch.no_grad():
        points = [trained.model(dataset.sample(index)[None])[0].numpy() for index in range(len(dataset))]
    return np.stack(points), list(dataset.paths), [dataset.class_names[label] for label in dataset.labels]


@pytest.fixture(scope="module")
def embeddings(run: Path) -> Path:
    from dmlkit.vectors.run import embed

    output = run.parent / "embeddings"
    embed(run, split="test", output=output, device="cpu")
    return output


def test_embeddings_equal_the_model_and_keep_their_order(run, embeddings):
    points, paths, labels = expected_embeddings(run)
    found = np.load(embeddings / "embeddings.npy", mmap_mode="r", allow_pickle=False)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, points, atol=1e-6)
    items = parquet.read_table(embeddings / "items.parquet").to_pydict()
    assert items == {"id": list(range(36)), "path": paths, "label": labels}
    manifest = json.loads((embeddings / "manifest.json").read_text())
    assert manifest["manifold"]["name"] == "sphere" and manifest["dim"] == 8 and manifest["count"] == 36
    assert manifest["preprocessing"]["size"] == 16
    trained = load_model(RunFolder(run), start_ranks("cpu"))
    assert manifest["model"]["fingerprint"] == trained.model.fingerprint()


def test_the_faiss_index_ranks_as_the_similarity_does(dmlkit, embeddings, tmp_path):
    assert dmlkit("export", embeddings, "--format", "faiss", "-o", tmp_path / "index.faiss").code == 0
    points = np.load(embeddings / "embeddings.npy")
    _, found = faiss.read_index(str(tmp_path / "index.faiss")).search(points, 5)
    similarity = points.astype(np.float64) @ points.T.astype(np.float64)
    best = -np.sort(-similarity, axis=1)[:, :5]  # by value: neighbours that tie in float32 may swap
    np.testing.assert_allclose(np.take_along_axis(similarity, found, axis=1), best, atol=3e-7)
    items = parquet.read_table(tmp_path / "index.faiss.items.parquet")
    assert items.equals(parquet.read_table(embeddings / "items.parquet"))


@pytest.mark.parametrize("precision", ["fp16", "int8", "binary"])
def test_a_faiss_index_of_lower_precision_holds_the_rounded_points(dmlkit, embeddings, tmp_path, precision: str):
    output = tmp_path / "index.faiss"
    result = dmlkit("export", embeddings, "--format", "faiss", "--precision", precision, "-o", output)
    points = np.load(embeddings / "embeddings.npy")
    if precision == "binary":
        signs = np.where(points >= 0, 1, 0)
        distances, _ = faiss.read_index_binary(str(output)).search(np.packbits(points >= 0, axis=1), 5)
        expected = (signs[:, None] != signs[None]).sum(2)
        np.testing.assert_array_equal(distances, np.sort(expected, axis=1)[:, :5])
        near = -expected.astype(np.float64)
    else:
        index = faiss.read_index(str(output))
        kept = points.astype(np.float16)
        if precision == "int8":
            low, high = points.min(0).astype(np.float64), points.max(0).astype(np.float64)
            step = (high - low) / 255
            kept = low + (np.floor((points - low) / step) + 0.5) * step  # FAISS decodes to the middle of a step
            decoded = np.asarray(index.reconstruct_n(0, len(points)))
            off = np.abs(decoded - kept) / step  # FAISS rounds in float32: a number at the end of a step may leave it
            assert off.max() < 1.01 and (off > 0.01).mean() < 0.03
            kept = decoded
        found, _ = index.search(points, 5)
        near = points.astype(np.float64) @ kept.T.astype(np.float64)
        np.testing.assert_allclose(found, -np.sort(-near, axis=1)[:, :5], atol=2e-6)
    size = {"fp16": "16 bytes", "int8": "8 bytes", "binary": "1 byte"}[precision]
    share = float(result.out.split(f"{size} per vector instead of 32; it finds ")[1].split()[0])
    similarity = points @ points.T
    for scores in (near, similarity):
        np.fill_diagonal(scores, -np.inf)
    best, mine = (np.argsort(-scores, axis=1, kind="stable")[:, :10] for scores in (similarity, near))
    shares = [len({*left} & {*right}) / 10 for left, right in zip(best, mine, strict=True)]
    assert share == pytest.approx(np.mean(shares), abs=0.05 if precision == "binary" else 0.01)  # ties of distances


def test_an_index_of_one_vector_has_no_nearest_images_to_report(dmlkit, tmp_path):
    alone = embeddings_at(tmp_path / "alone", np.eye(8, dtype=np.float32)[:1])
    result = dmlkit("export", alone, "--format", "faiss", "--precision", "fp16", "-o", tmp_path / "index.faiss")
    assert result.code == 0 and "16 bytes per vector instead of 32" in result.out and "it finds" not in result.out


def test_an_index_of_lower_precision_is_refused_where_it_would_reorder(dmlkit, tmp_path):
    flat = embeddings_at(tmp_path / "flat", manifold=EUCLIDEAN)
    dmlkit("export", flat, "--format", "faiss", "--precision", "fp16").refused("applies to embeddings on the sphere")
    assert not list(flat.glob("*.faiss"))


def test_parquet_npz_and_tensorboard_hold_the_same_rows(dmlkit, embeddings, tmp_path):
    points = np.load(embeddings / "embeddings.npy")
    for name in ("parquet", "npz", "tensorboard"):
        assert dmlkit("export", embeddings, "--format", name, "-o", tmp_path / f"out.{name}").code == 0
    table = parquet.read_table(tmp_path / "out.parquet")
    kind = table.schema.field("embedding").type
    assert (kind.list_size, str(kind.value_type)) == (8, "float")
    np.testing.assert_array_equal(np.array(table["embedding"].to_pylist(), dtype=np.float32), points)
    arrays = np.load(tmp_path / "out.npz", allow_pickle=False)
    np.testing.assert_array_equal(arrays["embeddings"], points)
    assert arrays["labels"].tolist() == table["label"].to_pylist()
    folder = tmp_path / "out.tensorboard"
    np.testing.assert_array_equal(np.fromfile(folder / "tensors.bytes", "<f4").reshape(36, 8), points)
    rows = (folder / "metadata.tsv").read_text().splitlines()
    assert rows[0] == "label\tpath" and len(rows) == 37 and rows[1].split("\t")[0] == arrays["labels"][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["safetensors", "onnx", "torch-export"])
def test_exported_models_agree_with_the_run(dmlkit, run, tmp_path, name, monkeypatch):
    target, trace, traces = tmp_path / "model.file", torch.export.export, []

    def count(*arguments, **options):
        traces.append(trace(*arguments, **options))
        return traces[-1]

    monkeypatch.setattr(torch.export, "export", count)
    result = dmlkit("export", run, "--format", name, "-o", target)
    assert len(traces) == (name != "safetensors")
    assert result.code == 0 and "agrees with the run on 16 images" in result.out
    points, _, _ = expected_embeddings(run)
    trained = load_model(RunFolder(run), start_ranks("cpu"))
    dataset = trained.recipe.dataset.build("test")
    images = torch.stack([dataset.sample(index) for index in range(5)])
    whole = images.permute(0, 2, 3, 1).contiguous()
    if name == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(target)
        found = session.run(None, {"images": whole.numpy()})[0]
        metadata = session.get_modelmeta().custom_metadata_map
        assert Description.from_json(metadata["dmlkit"], str(target)).model.fingerprint == trained.model.fingerprint()
        assert json.loads(metadata["labels"]) == json.loads((run / "classes.json").read_text())["training_classes"]
    elif name == "torch-export":
        with target.open("rb") as file:
            program = torch.export.load(file).module()
        found = program(whole).detach().numpy()
        large = torch.arange(61 * 47 * 3).remainder(251).to(torch.uint8).view(1, 61, 47, 3)
        resized = trained.recipe.transform.evaluation()(large[0].permute(2, 0, 1))
        torch.testing.assert_close(program(large), trained.model(resized[None]), atol=1e-6, rtol=0)
    else:
        from safetensors.torch import load_file

        weights = load_file(target)
        assert weights.keys() == trained.model.state_dict().keys()
        trained.model.load_state_dict(weights)
        found = trained.model(images).detach().numpy()
    np.testing.assert_allclose(found, points[:5], atol=1e-5)
    manifest = json.loads((tmp_path / "model.file.json").read_text())
    assert manifest["format"] == 1 and manifest["file_format"] == name
    assert manifest["parity"]["images"] == 16 and manifest["parity"]["largest_difference"] <= 1e-4
    assert ModelManifest.read(tmp_path / "model.file.json").model.fingerprint == trained.model.fingerprint()
    # tracing notes the line of code of each operation, with its path
    content, places = target.read_bytes(), (ROOT, Path(torch.__file__).parent, run.parent, tmp_path)
    assert [place for place in places if str(place).encode() in content] == []
    if name == "safetensors":
        from safetensors import safe_open

        with safe_open(target, "pt") as file:
            inside = file.metadata()["dmlkit"]
        described = {key: manifest[key] for key in json.loads(inside)}
        assert json.loads(inside) == {**described, "format": 1}  # a description has a format of its own
        assert Description.from_json(inside, str(target)).dim == 8


NOTHING, NAN = torch.zeros(8), torch.full((8,), torch.nan)


def test_operators_that_a_graph_cannot_express_are_named_with_a_way_round(dmlkit, run, tmp_path, monkeypatch):
    def with_svd(self, images):  # of few layers, which six exports trace
        return torch.linalg.svdvals(images.mean(1))

    def with_a_choice(self, images):
        return images.mean((1, 2)) if images.sum() > 0 else -images.mean((1, 2))

    missing = "ONNX cannot express this model (no form of the operator aten._linalg_svd)"
    monkeypatch.setattr(SmallCNN, "forward", with_svd)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    to = tmp_path / "model.onnx"
    for words, expected in (
        (["export", run, "--format", "onnx", "-o", to], f"--format onnx: {missing}; use --format torch-export"),
        (["export", run, "--format", "onnx", "--precision", "int8", "-o", to], f"int8: {missing}; use --format torch"),
        (
            ["embed", run, "--split", "test", "-o", tmp_path / "e", "--device", "cpu+onnxruntime"],
            f"{missing}; leave it out, or use bf16",
        ),
    ):
        result = dmlkit(*words)
        assert result.code == 2 and expected in result.err and not to.exists()
    assert dmlkit("export", run, "--format", "torch-export", "-o", tmp_path / "model.pt2").ok().err == ""
    monkeypatch.setattr(SmallCNN, "forward", with_a_choice)
    dmlkit("export", run, "--format", "torch-export", "-o", tmp_path / "other.pt2").refused(
        "--format torch-export: PyTorch cannot trace this model (", "use --format safetensors"
    )


def test_a_model_that_is_too_large_for_onnx_is_told_with_a_way_round(run, tmp_path, monkeypatch):
    monkeypatch.setattr("dmlkit.export.model.MOST_ONNX", 100)
    to = tmp_path / "model.onnx"
    refuses("--format onnx: the weights take .* use --format torch-export", export, run, "onnx", output=to)
    assert not to.exists()


def test_a_model_is_not_written_into_data_that_have_moved(run, tmp_path):
    to, moved = tmp_path / "m.onnx", WantedModel(overrides=(f"dataset={{name: folder, root: '{tmp_path}'}}",))
    refuses("this is inside .*, where every file is read as data", export, run, "onnx", output=to, model=moved)


@pytest.mark.parametrize(("one", "many"), [(NOTHING, None), (NAN, None), (NOTHING, NAN)])
def test_an_export_that_disagrees_is_not_kept(run, tmp_path, monkeypatch, one, many):
    from dmlkit.export.model import export_model

    trained = load_model(RunFolder(run), start_ranks("cpu"))

    def answer(batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 1:
            return one[None]
        return trained.model(batch) if many is None else many.expand(len(batch), 8)

    monkeypatch.setattr("dmlkit.export.model.write_onnx", lambda *words: words[-1].write_bytes(b"0") and answer)
    refuses("differs from the run", export_model, trained, "onnx", tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_squares_and_fewer_coordinates(dmlkit, run, tmp_path):
    import onnxruntime

    target = tmp_path / "short.onnx"
    words = ("export", run, "--format", "onnx", "-o", target)
    assert dmlkit(*words, "--input", "squares", "--dims", "3").code == 0
    session = onnxruntime.InferenceSession(target)
    dataset = load_model(RunFolder(run), start_ranks("cpu")).recipe.dataset.build("test")
    found = session.run(None, {"images": torch.stack([dataset.sample(index) for index in range(5)]).numpy()})[0]
    kept = expected_embeddings(run)[0][:5, :3]
    np.testing.assert_allclose(found, kept / np.linalg.norm(kept, axis=1, keepdims=True), atol=1e-5)
    assert ModelManifest.read(tmp_path / "short.onnx.json").dim == 3
    assert json.loads(session.get_modelmeta().custom_metadata_map["dmlkit"])["dim"] == 3
    dmlkit(*words, "--dims", "9").refused("--dims 9: expected 1 to 8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "name", "dim"),
    [("--dims", 3, "model-3.pt2", 3), ("--checkpoint", "pretrained", "model-pretrained.pt2", 16)],
)
def test_another_model_than_the_default_has_a_file_of_its_own(dmlkit, run, option, value, name, dim):
    before = {path.name for path in run.glob("exports/*")}
    dmlkit("export", run, "--format", "torch-export", "--input", "squares", option, value).ok()
    assert {path.name for path in run.glob("exports/*")} - before == {name, f"{name}.json"}
    program = torch.export.load(run / "exports" / name).module()
    assert program(torch.zeros(1, 3, 16, 16, dtype=torch.uint8)).shape == (1, dim)
