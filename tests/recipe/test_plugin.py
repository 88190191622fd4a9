"""Plug-ins, each in processes of their own: members stay for as long as a process does."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.datasets import trees
from tests.processes import Forked, command_lines, run_code

TOY = ROOT / "tests" / "toy_plugin"
RECIPE = """\
dataset: {name: toy_stripes, validation_fraction: 0.34}
transform: {name: plain, size: 16}
backbone: {name: small_cnn, width: 4}
embedding_dim: 8
loss: {name: toy_pairs}
sampler: {name: random, batch_size: 8}
training: {epochs: 1, select_by: recall@1}
metrics: [recall@1]
"""
RUN = "import sys; from tests.processes import command_lines; command_lines(*sys.argv[1:])"
STUDY = """\
claim: Steep pairs retrieve better than flat ones.
recipe: toy.yaml
seeds: [0]
metrics: [recall@1]
variants: {steep: {loss.scale: 8.0}, flat: {loss.scale: 1.0}}
expect: [{better: steep, than: flat, metric: recall@1}]
"""

pytestmark = pytest.mark.heavy
Told = list[tuple[int, str, str]]


def commands(folder: Path, *lines: str, installed: Path | None = None) -> Told:
    """Exit code, output and errors of command lines, given one after another in one process.

    Packages with plug-ins need a new interpreter, since they are looked for once; others fork one, 5 s faster.
    """
    path = ":".join(str(place) for place in (ROOT, installed) if place)
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "PATH": "/usr/bin:/bin"}
    if installed is None:
        process = Forked(command_lines, str(folder), *lines, environment=environment)
        output = process.communicate()[0]
        assert process.returncode == 0, output
    else:
        words = [sys.executable, "-c", RUN, str(folder), *lines]
        result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        output = result.stdout
    return [tuple(json.loads(line)) for line in output.splitlines() if line.startswith("[")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe of toy members, a study of it, and the toy package as one file."""
    path = tmp_path_factory.mktemp("plugins")
    (path / "toy.yaml").write_text(RECIPE)
    (path / "study.yaml").write_text(STUDY)
    parts = [(TOY / "toy_dml" / name).read_text() for name in ("losses.py", "datasets.py")]
    (path / "toy.py").write_text("\n".join(parts))
    return path


@pytest.fixture(scope="module")
def site(folder: Path) -> Path:
    """Folder into which pip installs a copy of the package; a copy, because pip writes next to what it builds."""
    target, copy = folder / "site", shutil.copytree(TOY, folder / "sources" / TOY.name)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, copy], capture_output=True, check=True)
    return target


@pytest.fixture(scope="module")
def trained(folder: Path, site: Path) -> Told:
    return commands(
        folder,
        "train toy.yaml -o runs/installed",
        "eval runs/installed --json",
        "embed runs/installed --split test",
        "export runs/installed --format safetensors",
        "export runs/installed/embeddings/test --format npz",
        "list losses",
        "schema",
        "check toy.yaml --set loss.scal=2",
        installed=site,
    )


def recorded(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "environment.json").read_text())["plugins"]


def test_members_of_an_installed_package_train_evaluate_embed_and_export(folder: Path, trained: Told):
    assert [code for code, _, _ in trained] == [0] * 7 + [2], trained
    assert json.loads(trained[1][1])["metrics"]["recall@1"] > 0.3  # 1 of 8 by chance
    assert (folder / "runs/installed/exports/model.safetensors").exists()
    assert (folder / "runs/installed/embeddings/test/embeddings.npz").exists()
    (record,) = recorded(folder / "runs/installed")
    assert (record["name"], record["version"], len(record["sha256"])) == ("toy-dml", "1.0", 64)


def test_members_are_listed_described_and_held_to_their_keys(trained: Told):
    assert "toy_pairs (toy-dml 1.0)" in trained[5][1] and "alpha, how steep it is." in trained[5][1]
    definitions = json.loads(trained[6][1])["$defs"]
    assert definitions["ToyPairsConfig"]["properties"]["scale"]["description"] == "alpha, how steep it is."
    assert "loss.scal: unknown key; did you mean 'scale'?" in trained[7][2]


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Told:
    return commands(
        folder,
        "train toy.yaml -o runs/file",
        "train toy.yaml -o runs/file --plugin toy.py",
        "eval runs/file --plugin toy.py --plugin ./toy.py --json",
        "embed runs/file --split test --plugin toy.py",
        "export runs/file --format safetensors --plugin toy.py",
    )


def test_members_of_a_file_do_where_it_is_named(folder: Path, loaded: Told):
    assert [code for code, _, _ in loaded] == [2, 0, 0, 0, 0], loaded
    assert "dataset.name: unknown dataset 'toy_stripes'; expected one of cars196, " in loaded[0][2]
    assert "; or load its file with --plugin FILE\nerror: " in loaded[0][2]
    text = "loss.name: unknown loss 'toy_pairs'; did you mean 'n_pair'? or load its file with --plugin FILE\n"
    assert text in loaded[0][2]
    (record,) = recorded(folder / "runs/file")
    assert (record["name"], record["version"]) == ("toy.py", None)
    assert list(folder.glob("__pycache__")) == []


def test_a_run_says_which_plugin_is_missing(folder: Path, trained: Told, loaded: Told):
    assert trained[0][0] == loaded[1][0] == 0
    installed, file, resumed = commands(
        folder, "eval runs/installed", "eval runs/file", "train toy.yaml -o runs/installed --resume --plugin toy.py"
    )
    assert installed[0] == resumed[0] == file[0] == 2
    assert (
        installed[2]
        == "error: runs/installed: needs the plug-in toy-dml 1.0; install it with: pip install toy-dml==1.0\n"
    )
    assert resumed[2] == installed[2]
    assert file[2].startswith("error: runs/file: needs the plug-in toy.py (sha256 ")
    assert file[2].endswith("...); load it with --plugin PATH/toy.py\n")


def test_a_run_says_which_plugin_has_changed(folder: Path, site: Path, trained: Told, tmp_path: Path):
    assert trained[0][0] == 0
    other = tmp_path / "site"
    shutil.copytree(site, other)
    with (other / "toy_dml" / "losses.py").open("a") as file:
        file.write("# changed\n")
    lines = ("eval runs/installed", "train toy.yaml -o runs/installed --resume")
    outcomes = commands(folder, *lines, installed=other)
    assert [code for code, _, _ in outcomes] == [0, 2]
    change = "runs/installed: trained with the plug-in toy-dml 1.0, now toy-dml 1.0 (sha256 "
    assert outcomes[0][2].startswith(change) and outcomes[0][2].count("\n") == 1
    assert len(list((folder / "runs/installed/vectors").iterdir())) == 2  # other code embeds again
    assert outcomes[1][2].startswith(f"error: {change}") and outcomes[1][2].count("\n") == 1


def test_runs_of_a_study_at_once_have_the_file_too(folder: Path):
    outcomes = commands(folder, "study study.yaml -o runs/study --workers 2 --plugin toy.py")
    assert outcomes[0][0] == 0, outcomes
    assert "--plugin toy.py" in (folder / "runs/study/results.md").read_text()


BAD = {
    "def f(:": "{path}: cannot load this plug-in: SyntaxError: invalid syntax (bad.py, line 1)",
    "\n\nimport nothere": "{path}: cannot load this plug-in: ModuleNotFoundError: No module named 'nothere' (line 3)",
    "import sys\nsys.exit()": "{path}: cannot load this plug-in: SystemExit (line 2)",
    "x = 1": '{path}: this plug-in defines no member of a family; expected a class such as Mine(Loss, name="mine"), '
    "or one that derives from DatasetConfig, Reader or another root",
    "TAKEN": "{path}: cannot load this plug-in: the name 'triplet' is taken by dmlkit; choose another (line 13)",
    "UNTYPED": "{path}: cannot load this plug-in: ToyPairsConfig: the class needs a field such as "
    'name: Literal["mine"] = "mine" (line 13)',
    "\0": "{path}: cannot load this plug-in: SyntaxError: source code string cannot contain null bytes",
}


def test_a_bad_file_is_told_in_one_line(folder: Path, tmp_path: Path):
    losses = (TOY / "toy_dml" / "losses.py").read_text()
    texts = {"TAKEN": losses.replace("toy_pairs", "triplet"), "UNTYPED": losses.replace('Literal["toy_pairs"]', "str")}
    (tmp_path / "toy.yaml").write_text(RECIPE)
    expected: list[str] = []
    lines: list[str] = []
    for index, (text, message) in enumerate(BAD.items()):
        path = tmp_path / str(index) / "bad.py"
        path.parent.mkdir()
        path.write_text(texts.get(text, text))
        lines.append(f"check toy.yaml --plugin {path}")
        expected.append(f"error: {message.format(path=path)}\n")
    outcomes = commands(
        tmp_path, *lines, "check toy.yaml --plugin gone.py", f"check toy.yaml --plugin {tmp_path}", "list losses"
    )
    assert [err for _, _, err in outcomes[: len(BAD)]] == expected
    assert [code for code, _, _ in outcomes] == [2] * (len(BAD) + 2) + [0]
    assert outcomes[-3][2] == "error: gone.py: no such plug-in; expected a Python file\n"
    assert outcomes[-2][2].endswith("cannot read this plug-in: this is a folder; expected a regular file\n")
    assert "toy_pairs" not in outcomes[-1][1]


def test_an_error_inside_a_plugin_names_its_file_and_line(tmp_path: Path):
    losses, datasets = ((TOY / "toy_dml" / name).read_text() for name in ("losses.py", "datasets.py"))
    whole = losses + datasets.replace("in_memory = True", "in_memory = False")  # other processes read its images
    faults = {
        "compute": ("        sign = (", '{}["sign"]', "KeyError: 'sign'"),
        "build": ("        return ToyPairs(", "1 / 0", "ZeroDivisionError: division by zero"),
        "sample": ("        label, shift = ", 'raise ValueError("no stripe")', "ValueError: no stripe"),
    }
    (tmp_path / "toy.yaml").write_text(RECIPE)
    for name, (place, fault, reason) in faults.items():
        path = tmp_path / f"{name}.py"
        path.write_text(whole.replace(place, f"        {fault}\n{place}"))
        line = path.read_text().splitlines().index(f"        {fault}") + 1
        words = f"train toy.yaml -o {name} --plugin {name}.py --device cpu --set training.workers=1"
        ((code, _, err),) = commands(tmp_path, words)
        assert (code, err) == (2, f"error: {path}:{line}: {reason}; raised by the plug-in {name}.py: fix it there\n")


def test_a_loss_that_is_no_scalar_with_a_gradient_is_one_line(tmp_path: Path):
    """A forgotten mean was an internal error to report."""
    whole = "".join((TOY / "toy_dml" / name).read_text() for name in ("losses.py", "datasets.py"))
    (tmp_path / "toy.yaml").write_text(RECIPE)
    returned = {
        "embeddings.sum(1)": r"ToyPairs returned \[\d+\], expected a scalar .+",
        "None": "ToyPairs returned None, expected a scalar .+",
        "embeddings.detach().sum()": "toy_pairs returned a tensor without a gradient; .+",
    }
    for number, (value, fault) in enumerate(returned.items()):
        name = f"loss{number}.py"
        (tmp_path / name).write_text(whole.replace("        sign = (", f"        return {value}\n        sign = ("))
        words = f"train toy.yaml -o {number} --plugin {name} --device cpu"
        terms = ("", " --overwrite --set regularizers=[{'name':threshold_consistency}]") if value == "None" else ("",)
        for code, _, err in commands(tmp_path, *(words + more for more in terms)):
            assert code == 2
            assert re.fullmatch(rf"error: toy.yaml:\d+: loss: {fault}\n", err), err


def test_a_dataset_that_breaks_its_contract_is_told_before_it_gives_a_wrong_result(tmp_path: Path):
    """Fractions trained as black images, and a class of the test chose the best epoch, both in silence."""
    whole = "".join((TOY / "toy_dml" / name).read_text() for name in ("losses.py", "datasets.py"))
    (tmp_path / "toy.yaml").write_text(RECIPE)
    image, expected = r"error: [\d.]+ degrees/\d: ", r", expected an image \(3, H, W\) uint8; .+"
    changes = {
        "((wave.sin() + 1) * 127).to(torch.uint8)": ("((wave.sin() + 1) / 2)", f"{image}torch.float32{expected}"),
        ".expand(3, -1, -1)": ("[None]", rf"{image}shape \(1, 16, 16\){expected}"),
        '"test": angles[1::2]': (
            '"test": angles[14:]',  # validation has the last angles of the training
            r"error: toy.yaml:1: dataset: test classes .+ too: 157.5 degrees; expected unseen ones",
        ),
        '            [f"{name}/{image}"': (
            '            [] and [f"{name}/{image}"',
            r"error: internal error of dmlkit .+; if dmlkit.testing finds no fault in toy3.py, please report it .+",
        ),
    }
    for number, (old, (new, message)) in enumerate(changes.items()):
        assert old in whole
        (tmp_path / f"toy{number}.py").write_text(whole.replace(old, new))
        words = f"train toy.yaml -o {number} --plugin toy{number}.py --device cpu"
        ((code, _, err),) = commands(tmp_path, words)
        assert (code, bool(re.fullmatch(message + "\n", err))) == (70 if number == 3 else 2, True), err


def test_packages_that_fail_are_left_out_and_told(folder: Path, site: Path, tmp_path: Path):
    """In the order of their names: aa needs what is not there, half defines a loss before it fails, zz is toy again."""
    losses = (TOY / "toy_dml" / "losses.py").read_text()
    texts = {
        "aa": "import nothere\n",
        "half": losses.replace("toy_pairs", "half_pairs") + "1 / 0\n",
        "unlisted": "x = 1\n",
        "zz": losses,
    }
    both = shutil.copytree(site, tmp_path / "both")
    for name, text in texts.items():  # as pip writes them, which takes 3 s to start and 1 s to build each
        (both / f"{name}_dml.py").write_text(text)
        about = both / f"{name}_dml-2.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}-dml\nVersion: 2.0\n")
        (about / "entry_points.txt").write_text(f"[dmlkit]\nmembers = {name}_dml\n")
    (checked, listed) = commands(folder, "check toy.yaml", "list losses", installed=both)
    assert checked[0] == listed[0] == 0
    assert checked[2].splitlines() == [
        "warning: plug-in aa-dml 2.0 is skipped: aa_dml cannot be imported: ModuleNotFoundError: No module named "
        "'nothere'; fix or uninstall it",
        "warning: plug-in half-dml 2.0 is skipped: half_dml cannot be imported: ZeroDivisionError: division by zero; "
        "fix or uninstall it",
        "warning: plug-in zz-dml 2.0 is skipped: zz_dml cannot be imported: the name 'toy_pairs' is taken by toy-dml "
        "1.0; choose another; fix or uninstall it",
    ]
    assert "half_pairs" not in listed[1] and "toy_pairs (toy-dml 1.0)" in listed[1]


def test_the_toys_keep_the_contracts_of_their_families(folder: Path):
    text = (
        "from toy import ToyPairsConfig, ToyStripesConfig; from dmlkit.testing import check_dataset, check_loss; "
        "check_loss(ToyPairsConfig(scale=2.0)); check_dataset(ToyStripesConfig(validation_fraction=0.34))"
    )
    process = Forked(run_code, str(folder), text)
    output = process.communicate()[0]
    assert process.returncode == 0, output


def test_the_page_does_what_it_says(tmp_path: Path):
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    lines: list[str] = []
    for kind, body in re.findall(r"```(python|yaml|sh)\n(.*?)```", page, re.DOTALL):
        if kind == "sh":
            lines += [line.removeprefix("dmlkit ") for line in body.splitlines()]
        else:
            name, _, text = body.removeprefix("# ").partition("\n")
            (tmp_path / name).write_text(text)
    outcomes = commands(tmp_path, *lines)
    assert [code for code, _, _ in outcomes] == [0] * 3, outcomes
    assert "Factor on the similarity; larger is steeper." in outcomes[0][1]
    failed = Forked(run_code, str(tmp_path), "from test_my_losses import test_my_pairs; test_my_pairs()").communicate()[
        0
    ]
    (message,) = re.findall(r"^    (my_pairs on .*\n    .*)$", page, re.MULTILINE)
    assert " ".join(message.split()) in failed


def test_the_command_line_starts_without_plugins(site: Path, tmp_path: Path):
    code = "import sys; from dmlkit.cli.app import app; print([name for name in sys.modules if 'toy' in name])"
    result = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": f"{ROOT}:{site}"}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


READER = """
from pathlib import Path

from dmlkit.files.readers.base import ImageTable, Reader, table_of


class ListReader(Reader):
    title = "list"

    def recognizes(self, path: Path) -> bool:
        return path.suffix == ".lst"

    def read(self, path: Path) -> ImageTable:
        rows = [dict(zip(("path", "label"), line.split(), strict=True)) for line in path.read_text().splitlines()]
        return ImageTable(table_of(rows), path, path.parent)
"""


def test_a_file_with_a_reader_alone(tmp_path: Path):
    """It needs no member of a family, and one that fails leaves no reader."""
    trees.photos(tmp_path, (f"{number}.jpg" for number in range(8)))
    (tmp_path / "photos.lst").write_text("".join(f"{number}.jpg c{number // 2}\n" for number in range(8)))
    (tmp_path / "list_reader.py").write_text(READER)
    (tmp_path / "broken.py").write_text(f"{READER}\nraise ValueError(3)\n")
    line = "data check photos.lst"
    with_it, broken, without = commands(tmp_path, f"{line} --plugin list_reader.py", f"{line} --plugin broken.py", line)
    assert with_it[0] == 0 and "no errors found" in with_it[1]
    assert "broken.py: cannot load this plug-in: ValueError: 3" in broken[2]
    assert without[0] == 0  # a file stays loaded in the process
