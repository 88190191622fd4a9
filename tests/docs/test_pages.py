"""The pages of docs/ do what they say: their recipes, commands and Python run one after another in an empty folder."""

import pkgutil
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from dmlkit.cli.app import INTERNAL_ERROR, USER_ERROR, app
from dmlkit.cli.data import DATA_ERROR
from dmlkit.cli.study import BUDGET_USED
from dmlkit.distributed.launch import OWN_STORE
from dmlkit.distributed.stopping import STOPPED
from dmlkit.files import document, yaml_tree
from dmlkit.files.image_file import FORMATS, MAX_PIXELS, MAX_SIDE
from dmlkit.losses.base import LossConfig
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.schema import FAMILIES
from dmlkit.study.definition.file import MAX_RECIPES
from tests.conftest import ONE_EPOCH, ROOT, TINY_RECIPE
from tests.datasets import trees
from tests.docs.blocks import blocks_of, page, run_blocks

TINY_PHOTOS = [
    "backbone={name: small_cnn, width: 4}",
    "transform={name: imagenet, size: 16, resize: 20}",
    "embedding_dim=8",
    "sampler.batch_size=4",
    "training.epochs=1",
    "training.workers=0",
]


COMMAND = re.compile(r"^\s*(?:[^`|\n]*-m |#\s*Run:\s*)?@?(?:\.venv/bin/|\$\(BIN\)/)?dmlkit ([a-z].*)$", re.MULTILINE)
OF_IMAGES = ("backbone", "transform", "training.workers")


def test_the_functions_that_the_page_on_python_names_exist():
    names = set(re.findall(r"`(dmlkit\.[\w.]+)", (ROOT / "docs" / "python.md").read_text(encoding="utf-8")))
    assert len(names) > 5 and all(pkgutil.resolve_name(name) for name in names)


def vectors() -> None:
    values = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
    np.save("x.npy", values)
    np.save("y.npy", np.arange(8).repeat(4))
    np.save("new.npy", values[:3])


def photos_and_table() -> None:
    rows = ["path,label"]
    for label, name in enumerate(("crow", "dove", "finch", "gull", "heron", "ibis", "jay", "kite")):
        for index in range(4):
            trees.photo(Path("photos") / name / f"{index}.jpg", 10 * label + index)
            rows.append(f"photos/{name}/{index}.jpg,{name}")
    trees.photo(Path("new") / "photo.jpg", 99)
    Path("catalogue.csv").write_text("\n".join(rows))
    vectors()


def demo_run(dmlkit) -> None:
    Path("recipe.yaml").write_text(ONE_EPOCH)
    assert dmlkit("train", "recipe.yaml", "-o", "runs/demo").code == 0


def run_and_photos(dmlkit) -> None:
    demo_run(dmlkit)
    trees.photos(Path("photos"), (f"{index}.jpg" for index in range(3)))


def run_and_birds(dmlkit) -> None:
    demo_run(dmlkit)
    for index, name in enumerate(("crow", "crow", "dove", "finch")):
        trees.photo(Path("photos") / name / f"{index}.jpg", index)
        trees.photo(Path("more") / f"{index}.jpg", 50 + index)


def two_runs(dmlkit) -> None:
    Path("recipe.yaml").write_text(TINY_RECIPE.replace("classes: 12", "classes: 24"))  # folds of 3 classes
    for seed, name in enumerate(("demo", "other")):
        assert dmlkit("train", "recipe.yaml", "-o", f"runs/{name}", "--set", f"seed={seed}").code == 0


def glyphs_run(dmlkit) -> None:
    recipe = Path("recipes/glyphs/proxy_anchor.yaml")
    recipe.parent.mkdir(parents=True)
    recipe.write_text(TINY_RECIPE)
    assert dmlkit("train", recipe, "-o", "runs/demo").code == 0


PREPARED: dict[str, tuple[Callable[..., None], str]] = {  # and what the blocks of the page leave behind
    "data": (
        lambda _: photos_and_table(),
        "embeddings/catalogue/index.faiss runs/catalogue/classes.json runs/vectors/exports/model.onnx",
    ),
    "embedding": (run_and_photos, "embeddings/photos/embeddings.npy"),
    "evaluation": (two_runs, "classes.csv runs/folds/results.md"),
    "gallery": (run_and_birds, "galleries/birds/gallery.json answers.csv answers.html"),
    "geometry": (glyphs_run, "runs/disk/plots/test-disk.png runs/demo/plots/test-tsne.png"),
    "loggers": (lambda _: None, "runs/logged/loggers.json runs/logged/tensorboard"),
    "pictures": (two_runs, "panel.pdf epochs.png margin.pdf runs/study/margin/plots/epochs.png"),
    "python": (run_and_birds, "galleries/birds/gallery.json"),
}
PRINTED = {"data": "photos/", "geometry": "[[0, "}  # an image finds itself first


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(PREPARED))
def test_every_block_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit):
    monkeypatch.chdir(tmp_path)
    prepare, left_behind = PREPARED[name]
    prepare(dmlkit)
    blocks = blocks_of(page(name), "sh", "yaml", "python")
    assert {kind for kind, _ in blocks} >= {"sh"}

    def tiny(arguments: list[str]) -> list[str]:
        if name != "data" or not any(argument.endswith(".yaml") for argument in arguments):
            return []
        keys = [key for key in TINY_PHOTOS if "vectors.yaml" not in arguments or not key.startswith(OF_IMAGES)]
        return [part for key in keys for part in ("--set", key)]

    assert PRINTED.get(name, "") in run_blocks(blocks, dmlkit, tiny)
    assert all(Path(path).exists() for path in left_behind.split())


TYPED = ["README.md", "Makefile", "docs/*.md", "docs/papers/*.md", "docs/commands/*.md", "recipes/**/*.yaml"]


@pytest.mark.parametrize("place", TYPED)
def test_every_command_is_understood(place: str):
    for path in sorted(ROOT.glob(place)):
        found = COMMAND.findall(path.read_text(encoding="utf-8").replace("\\\n", " "))
        for command in found:
            words = re.split(r"  #| \|\| ", re.sub(r" --plugin \S+", "", command))[0]  # an option of all commands
            name, *rest = shlex.split(words)
            get_command(app).commands[name].make_context(name, rest)
        assert found or path.stem not in (*PREPARED, "scale", "Makefile", "README"), path


def test_the_library_example_runs():
    code, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    exec(code, scope)
    assert scope["loss"].proxies.grad.isfinite().all()


@pytest.mark.slow
def test_the_example_of_commands_as_functions_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    pytest.importorskip("lancedb", reason="the extra dmlkit[lancedb] is not installed")
    monkeypatch.chdir(tmp_path)  # where no recipes are
    for seed, name in enumerate(("robin", "wren")):
        trees.photo(Path("photos") / name / "1.jpg", seed)
    _, code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(code, {})
    figures, shape, answers = capsys.readouterr().out.splitlines()
    recall, low, high = map(float, re.findall(r"[\d.]+", figures))
    assert low <= recall <= high and shape == "(2, 2)" and answers == "{'photos/wren/1.jpg': 'wren'}"


def test_scale_tells_how_ranks_are_restarted():
    assert f"{OWN_STORE}=1 torchrun" in page("scale")


@pytest.mark.parametrize("loss", sorted(set(LossConfig.variants) - {"sum"}))
def test_the_losses_that_scale_names_share_proxies_out_and_sample(loss: str):
    text = page("scale")
    named = f"`{loss}`" in text.partition("Both options work with")[2].partition("need the proxies")[0]
    sets = ["training.shard_proxies=true"]
    if not named:
        with pytest.raises(Exception, match="does not support sharded proxies"):
            parse_recipe(TINY_RECIPE.replace("proxy_anchor", loss), "tiny.yaml", sets)
        return
    for key in re.findall(r"`((?:loss|training)\.\w+=[^`]+)`", text):
        parse_recipe(TINY_RECIPE.replace("proxy_anchor", loss), "tiny.yaml", [*sets, key] if "fp" not in key else [key])


def test_the_page_of_keys_is_what_the_classes_say(dmlkit, tmp_path):
    assert dmlkit("list", "-o", tmp_path / "keys.md").code == 0
    assert page("recipe_keys") == (tmp_path / "keys.md").read_text(encoding="utf-8")


def test_every_key_of_every_member_is_on_the_page_of_keys():
    for family, config in FAMILIES.items():
        _, _, part = page("recipe_keys").partition(f"\n## {family}\n")
        shared, *members = part.partition("\n## ")[0].split("\n### ")
        keys = {member.partition("\n")[0]: re.findall(r"`(\w+)`(?=[,.: ])", member) for member in members}
        own = {name: one for name, one in config.variants.items() if one.__module__.startswith("dmlkit.")}
        assert {name: sorted(found) for name, found in keys.items()} == {
            name: sorted({*one.model_fields} - {"name"}) for name, one in own.items()
        }
        explained = dict(re.findall(r"^- `(\w+)`(?: \(`.*`\))?: (.+)$", shared, re.MULTILINE))
        for member in members:
            here = {*re.findall(r"^- `(\w+)`", member, re.MULTILINE)}
            assert {*keys[member.partition("\n")[0]]} <= here | {*explained}


def test_the_schema_explains_every_key(dmlkit):
    schema = dmlkit("schema").json()
    for name, part in {"Recipe": schema, **schema["$defs"]}.items():
        for key, described in part.get("properties", {}).items():
            assert key == "name" or described.get("description"), f"{name}.{key}"


def test_the_exit_codes_are_those_of_the_command_line():
    codes = re.findall(r"^\| (\d+) \|", page("commands"), re.MULTILINE)
    assert [int(code) for code in codes] == [0, DATA_ERROR, USER_ERROR, INTERNAL_ERROR, BUDGET_USED, STOPPED]


def test_the_limits_of_security_are_those_of_the_code():
    pytest.importorskip("fastapi", reason="needs dmlkit[serve]")
    from dmlkit.serve import requests, service

    text = " ".join((ROOT / "SECURITY.md").read_text(encoding="utf-8").split())
    formats = ", ".join({"WEBP": "WebP"}.get(name, name) for name in FORMATS[:-1])
    limits = (
        (f"opens only {formats} and {FORMATS[-1]} images", None),
        ("at most {} pixels", MAX_PIXELS),
        ("and at most {} on a side", MAX_SIDE),
        ("at most {} MB, ", yaml_tree.MAX_BYTES // 10**6),
        ("MB, {} values", yaml_tree.MAX_NODES),
        ("values and {} levels", yaml_tree.MAX_DEPTH),
        ("at most {} recipes", MAX_RECIPES),
        ("documents of at most {} MB", document.MAX_BYTES // 10**6),
        ("at most {} images, ", requests.MOST_IMAGES),
        ("images, {} MB and ", requests.MOST_BYTES // 10**6),
        ("and {} megapixels per request", service.MOST_PIXELS // 10**6),
        ("and {} images, ", service.MOST_WAITING),
        ("{} MB and 400 megapixels in all", requests.MOST_BYTES_AT_ONCE // 10**6),
        ("and {} megapixels in all", service.MOST_PIXELS_WAITING // 10**6),
    )
    for words, number in limits:
        assert words.format(f"{number or 0:,}".replace(",", " ")) in text


def test_the_modules_and_folders_that_pages_name_exist():
    pages = [ROOT / "AGENTS.md", ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {path for page in pages for path in re.findall(r"`(dmlkit/[\w/.]+)`", page.read_text("utf-8"))}
    assert len(named) > 30 and {path for path in named if not (ROOT / path).exists()} == set()
