"""An error of a component carries the recipe's key, and gets file and line in one place."""

import ast
import pickle
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dmlkit.cli.app import INTERNAL_ERROR, USER_ERROR, message_of
from dmlkit.errors import OptionError, UserError, option_errors
from dmlkit.files.source import require_path
from dmlkit.recipe import parse_recipe
from dmlkit.samplers import ClassBalanced
from dmlkit.training.experiment import assemble
from tests.datasets.trees import photo
from tests.test_architecture import PACKAGE, tree_of

LINES = {
    "dataset": "{name: glyphs, classes: 12, images_per_class: 4, size: 16}",
    "backbone": "{name: small_cnn, width: 4}",
    "loss": "{name: triplet}",
    "sampler": "{name: random, batch_size: 8}",
    "transform": "{name: plain, size: 16}",
}


def text_of(**lines: str) -> str:
    """A recipe with one key per line, in the order of `LINES`."""
    return "".join(f"{key}: {value}\n" for key, value in {**LINES, **lines}.items())


def printed(**lines: str) -> str:
    with pytest.raises(UserError) as raised:
        assemble(parse_recipe(text_of(**lines), "r.yaml"))
    return str(raised.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"dataset": "{name: glyphs, classes: 12, images_per_class: 2, shapes_per_class: 3}"},
         "r.yaml:1: dataset.images_per_class: got 2, expected at least 3 (shapes_per_class)"),
        ({"dataset": "{name: folder, root: 'no: such'}"},
         "r.yaml:1: dataset.root: no: such: no such folder; expected one subfolder of images per class"),
        ({"dataset": "{name: table, file: no.csv}"}, "r.yaml:1: dataset.file: no.csv: no such file; if it has moved"),
        ({"backbone": "{name: small_cnn, tuning: {name: last_blocks, blocks: 40}}"}, "r.yaml:2: backbone.tuning"),
        ({"sampler": "{name: random, batch_size: 100}"},
         "r.yaml:4: sampler.batch_size: expected at most the 16 training images, got 100; reduce it or add images"),
        ({"sampler": "{name: hierarchical}"}, "r.yaml:4: sampler: hierarchical needs a dataset with super-classes"),
    ],
)  # fmt: skip
def test_each_family_names_its_key_and_the_recipe_adds_file_and_line(lines: dict[str, str], message: str):
    assert printed(**lines).startswith(message)


def test_a_photo_that_is_gone_is_named_before_training(tmp_path: Path):
    names = [photo(tmp_path / f"{label}" / f"{number}.jpg", label).name for label in range(4) for number in range(4)]
    rows = [f"{row // 4}/{name},{row // 4}\n" for row, name in enumerate(names)]
    (tmp_path / "photos.csv").write_text("path,label\n" + "".join(rows))
    for gone in ("3/1.jpg", "3/2.jpg"):  # of a test class
        (tmp_path / gone).unlink()
    table = f"name: table, file: {tmp_path}/photos.csv, validation_fraction: 0"
    missing = f"{tmp_path}/3/1.jpg: no such file; 2 of the 8 images of the test split are missing, also"
    assert printed(dataset=f"{{{table}}}").startswith(f"{missing} {tmp_path}/3/2.jpg: restore them, set dataset.root")
    skipping = f"{{{table}, on_bad_image: skip}}"
    assert len(assemble(parse_recipe(text_of(dataset=skipping), "r.yaml")).train) == 8
    shutil.rmtree(tmp_path / "2")
    shutil.rmtree(tmp_path / "3")
    assert "the test split: none of 8 images could be read" in printed(dataset=skipping)


def test_vectors_name_the_key_of_each_file(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.ones((6, 3), np.float32))
    np.save(tmp_path / "few.npy", np.arange(2))
    vectors = {"backbone": "{name: identity}", "transform": "null"}
    dataset = f"{{name: vectors, embeddings: {tmp_path}/x.npy, labels: {tmp_path}/few.npy}}"
    message = f"r.yaml:1: dataset.labels: {tmp_path}/few.npy has 2 values, but {tmp_path}/x.npy has 6 vectors; "
    assert printed(dataset=dataset, **vectors).startswith(message)
    message = "r.yaml:1: dataset.embeddings: none.npy: "
    assert printed(dataset="{name: vectors, embeddings: none.npy}", **vectors).startswith(message)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_memory_error_that_an_import_lost_is_one_of_memory_where_memory_is_limited():
    import resource

    lost = SystemError("error return without exception set"), RuntimeError("operator torchvision::nms does not exist")
    before = resource.getrlimit(resource.RLIMIT_AS)
    answers: list[list[bool]] = []
    for limit in (resource.RLIM_INFINITY, 2**46):
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
        messages = [message_of(error) for error in lost]
        answers.append([code == USER_ERROR and "ulimit -v" in text for text, code in messages])
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert answers == [[False, False], [True, True]]
    assert "ulimit -u" in message_of(RuntimeError("can't start new thread"))[0]


def test_the_key_is_an_attribute_and_survives_another_process():
    with pytest.raises(OptionError) as raised:
        ClassBalanced.Config(classes_per_batch=9).build(torch.arange(4).repeat(4), 0)
    error = pickle.loads(pickle.dumps(raised.value))
    assert (type(error), error.key, str(error)) == (
        OptionError,
        "sampler.classes_per_batch",
        f"sampler.classes_per_batch: {error.message}",
    )


@pytest.mark.parametrize("text", ["dataset.root: is a word of this text", "dataset: what: else", "a: b", ""])
def test_a_text_with_a_colon_is_not_taken_for_a_key(text: str):
    recipe = parse_recipe(text_of(), "r.yaml")
    with pytest.raises(UserError) as raised, recipe.errors_at("dataset"):
        raise UserError(text)
    assert str(raised.value) == text
    with pytest.raises(UserError) as raised, recipe.errors_at("dataset"):
        raise OptionError("loss.margin", text)
    assert str(raised.value) == (f"r.yaml:3: loss.margin: {text}" if text else "r.yaml:3: loss.margin")
    with pytest.raises(UserError) as raised, recipe.errors_at("sampler"):
        raise ValueError(f"{text}\nand more")
    assert str(raised.value).startswith("r.yaml:4: sampler") and str(raised.value).endswith(text)


def test_an_option_named_by_the_command_line_is_told():
    recipe = parse_recipe(text_of(), "r.yaml", ["loss.margin=0.3"])
    assert recipe.fault(("loss", "margin"), "got 0.3") == "--set loss.margin=0.3: loss.margin: got 0.3"
    assert recipe.model_copy(update={"seed": 1}).read_from({}).fault(("seed",), "got 1") == "seed: got 1"


def test_the_innermost_key_stays():
    with pytest.raises(OptionError) as raised, option_errors("dataset.file"), option_errors("dataset.root"):
        raise UserError("photos: not readable")
    assert (raised.value.key, raised.value.message) == ("dataset.root", "photos: not readable")


KEYED = re.compile(r"(dataset|sampler|loss|backbone|head|manifold|training|optimizer|schedule|transform|metrics)[.:]")


def test_no_text_of_an_error_begins_with_a_key():
    """A key in the text would have to be read from it again."""
    wrong: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("UserError", "ValueError") and node.args:
                text = ast.unparse(node.args[0]).removeprefix("f")[1:]
                wrong += [f"{path}:{node.lineno}: {text}"] if KEYED.match(text) else []
    assert wrong == []


def test_memory_that_runs_out_is_no_internal_error_in_any_command():
    with pytest.raises(RuntimeError) as of_the_machine:
        torch.empty(2**52)
    of_a_gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Including non-PyTorch memory")
    messages, codes = zip(*map(message_of, (of_the_machine.value, of_a_gpu, MemoryError())), strict=True)
    assert messages[0].startswith("not enough memory: can't allocate memory: you tried to allocate ")
    assert messages[1].startswith("not enough memory: CUDA out of memory. Tried to allocate 2.00 GiB; other programs")
    assert messages[2] == "not enough memory: the machine's memory ran out"
    assert {*codes} == {USER_ERROR} and message_of(RuntimeError("expected a tensor"))[1] == INTERNAL_ERROR


def test_a_path_that_appears_while_it_is_missed_is_not_its_own_suggestion(tmp_path, monkeypatch):
    (tmp_path / "study").mkdir()
    exists = Path.exists
    for looks in (1, 2):  # after which it is there
        late = iter([False] * looks)
        monkeypatch.setattr(
            Path, "exists", lambda one, late=late: next(late, True) if one.name == "study" else exists(one)
        )
        with pytest.raises(UserError, match="no such file or folder; expected a folder of a study"):
            require_path(tmp_path / "study", "a folder of a study")
