"""Networks as lists of operators: equal to the bit to the networks, and nothing but operators in their files."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dmlkit.distributed.launch import start_ranks
from dmlkit.model import build_model
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.train import train
from dmlkit.vectors import computation
from dmlkit.vectors.operators import read_operators, write_operators
from dmlkit.vectors.trained import load_model
from tests.conftest import TINY_RECIPE
from tests.datasets import trees
from tests.vectors.stored import check_imports

timm = pytest.importorskip("timm", reason="the extra dmlkit[timm] is not installed")
LITE0 = "{name: timm, model: tf_efficientnet_lite0, weights: null}"


def recipe_of(backbone: str) -> str:
    found = TINY_RECIPE.replace("{name: small_cnn, width: 4}", backbone)
    assert found != TINY_RECIPE
    return found


@pytest.mark.parametrize(
    "backbone",
    [
        LITE0,
        "{name: timm, model: test_vit, weights: null}",
        "{name: timm, model: test_resnet, weights: null}",
        "{name: timm, model: test_convnext, weights: null}",
        "{name: resnet18, weights: null}",
    ],
)
@torch.no_grad()
def test_operators_give_the_points_of_the_network_to_the_bit(backbone: str, tmp_path: Path):
    size = 160 if "test_" in backbone else 64
    recipe = parse_recipe(recipe_of(backbone).replace("plain, size: 16", f"plain, size: {size}"), "tiny.yaml")
    torch.manual_seed(0)
    model = build_model(recipe)
    images = torch.randint(0, 256, (7, 3, size, size), dtype=torch.uint8)
    model.train()(images)  # so that statistics of batch norms are not those of the start
    model.eval()
    write_operators(nn.Sequential(model.backbone, model.head), model.normalization(images[:2]), tmp_path / "x")
    points = read_operators(tmp_path / "x")
    for count in (1, 2, 3, 7):
        assert torch.equal(points(model.normalization(images[:count])), model(images[:count]))


def test_a_file_names_operators_of_pytorch_alone(tmp_path: Path):
    write_operators(nn.Linear(3, 2), torch.ones(2, 3), tmp_path / "x")
    with safe_open(tmp_path / "x", "pt") as file:
        content, tensors = json.loads(file.metadata()["operators"]), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    for name in ("os.system.default", "aten.from_file.default", "getattr"):
        content["steps"][0][1] = name
        save_file(tensors, tmp_path / "y", {"operators": json.dumps(content)})
        with pytest.raises(ValueError, match="is none of PyTorch's operators"):
            read_operators(tmp_path / "y")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of a network of timm in ``run``, and its photos."""
    folder = tmp_path_factory.mktemp("operators")
    for index in range(64):
        trees.photo(folder / "photos" / "abcdefgh"[index % 8] / f"{index:02}.jpg", index)
    (folder / "tiny.yaml").write_text(recipe_of("{name: timm, model: test_resnet, weights: null}"))
    overrides = ["training={epochs: 1, workers: 0}", f"dataset={{name: folder, root: {folder / 'photos'}}}"]
    train(folder / "tiny.yaml", folder / "run", overrides=overrides, device="cpu")
    return folder


HEAVY = "faiss timm torchvision torch._dynamo sklearn scipy.stats pandas openTSNE matplotlib onnxruntime"


@pytest.mark.slow
def test_answers_to_one_photo_import_no_library_of_models(home, tmp_path, monkeypatch, dmlkit):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("dmlkit.vectors.fill.BATCH_IMAGES", 4)
    monkeypatch.chdir(home)
    trees.photo(home / "new.jpg", 99)
    before = dmlkit("search", "run", "new.jpg", "--device", "cpu")
    dmlkit("gallery", "create", "run", "photos", "-o", "gallery", "--device", "cpu").ok()
    for words in (("eval", "run"), ("calibrate", "run")):
        dmlkit(*words, "--device", "cpu").ok()
    answers = ("identify gallery new.jpg", "identify run new.jpg", "search gallery new.jpg", "embed run new.jpg -o one")
    check_imports(HEAVY, *answers, "verify run new.jpg photos/a/00.jpg", "eval run")
    assert dmlkit("search", "run", "new.jpg", "--device", "cpu").out == before.out
    (graph,) = (tmp_path / "dmlkit").glob("engine-*-operators.safetensors")
    graph.write_bytes(b"of another run")
    assert dmlkit("search", "run", "new.jpg", "--device", "cpu").out == before.out


def test_operators_that_compute_something_else_are_not_kept(home, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read = computation.read_operators

    def altered(path: Path) -> Callable[[Tensor], Tensor]:
        points = read(path)
        return lambda images: points(images) * (1 + 1e-6)

    trained = load_model(RunFolder(home / "run"), start_ranks("cpu"))
    with monkeypatch.context() as wrong:
        wrong.setattr(computation, "read_operators", altered)
        computation.keep_operators(trained)
    assert computation.kept_operators(trained) is None
    computation.keep_operators(trained)
    assert computation.kept_operators(trained) is not None
    shutil.rmtree(tmp_path / "dmlkit")
    assert computation.kept_operators(trained) is None


def test_a_full_disk_of_the_cache_does_not_stop_a_command(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("dmlkit.vectors.operators.save_file", full)
    trained = load_model(RunFolder(home / "run"), start_ranks("cpu"))
    computation.keep_operators(trained)
    assert computation.kept_operators(trained) is None


def test_threads_that_embed_at_once_make_a_network_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As those of a server do, when the operators are kept for another number of threads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained, start = load_model(RunFolder(home / "run"), start_ranks("cpu")), Barrier(4)

    def few(_: int) -> object:
        start.wait()
        return trained.model_of_few

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(few, range(4)))) == 1
    computation.keep_operators(trained)
    again = load_model(RunFolder(home / "run"), start_ranks("cpu"))
    assert isinstance(again.model_of_few, computation.ComputedModel)
    assert again.model_of_few is again.model_of_few  # a server read the file for every request
