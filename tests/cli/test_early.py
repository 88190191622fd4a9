"""A wrong path is refused before torch is imported, which takes seconds; commands that only read need no torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmlkit.cli.options import Writes
from dmlkit.gallery.manifest import GalleryManifest
from dmlkit.run_folder.documents import Environment
from dmlkit.vectors.manifest import Description
from tests.conftest import Cli, Result, every_command
from tests.vectors.stored import manifest

NO_RUN = "no run here (recipe.yaml or environment.json is missing); expected a folder that train wrote"
NO_SOURCE = "no such file or folder; expected a run, a folder of embeddings, a gallery or a file of vectors"
NO_DATA = (
    "no such file or folder; expected a folder with one subfolder per class, a table or annotations (see docs/data.md)"
    ", or a recipe (.yaml)"
)
NO_GALLERY = "no gallery here (gallery.json is missing); expected a folder that dmlkit gallery create wrote"
ONE_RUN = "has embeddings of one run; create a gallery of both with dmlkit gallery create RUN IMAGES --with run"
NO_SECOND, REMOVE = "applies to a run or a gallery", "remove this option"
NO_LABELS = "no such file or folder; expected labels (.npy, .npz, .txt, .csv or .parquet)"
NO_IMAGES = "empty: no images found in this folder or below it"
NO_STUDY = "no study here (study.json is missing); expected a folder that dmlkit study wrote"
NO_RECIPE = "no such file; expected a recipe or a name that dmlkit list recipes shows"
COMMANDS = """
import json, os, sys
from functools import cache

# What most commands import and build first, once: a command took 0.24 s otherwise. All of it is without torch too.
import filelock, pydantic.json_schema, pydantic.type_adapter, rich.console, typer.main, yaml
from dmlkit.cli.app import app, main
from dmlkit.gallery import files
from dmlkit.recipe import overrides, plugin
from dmlkit.run_folder import folder

typer.main.get_command = cache(typer.main.get_command)
typer.main.get_command(app)
commands, unwanted = map(json.loads, sys.argv[1:])
for number, words in enumerate(commands):
    sys.stdout.flush()
    if os.fork() == 0:  # so that no command meets what another has imported
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        sys.argv = ["dmlkit", *words]
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(99 if {*unwanted} & {*sys.modules} else code)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def without_torch(folder: Path, commands: list[str], *others: str) -> list[Result]:
    """The results of command lines, each in a process of its own that must not import torch, nor some others."""
    words = json.dumps([command.split() for command in commands]), json.dumps(["torch", *others])
    ran = subprocess.run(
        [sys.executable, "-c", COMMANDS, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    codes = [int(line) for line in ran.stdout.splitlines()]
    assert len(codes) == len(commands)
    return [
        Result(code, (folder / f"{number}.out").read_text(), (folder / f"{number}.err").read_text())
        for number, code in enumerate(codes)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an array, an empty folder, half a run, half a gallery and what looks like a study, and one."""
    tmp_path = tmp_path_factory.mktemp("place")
    np.save(tmp_path / "x.npy", np.eye(4, dtype=np.float32))
    for name in ("empty", "half", "run", "stopped", "study", "started"):
        (tmp_path / name).mkdir()
    for name in ("half/recipe.yaml", "run/recipe.yaml", "run/environment.json"):
        (tmp_path / name).touch()
    (tmp_path / "broken.yaml").write_text("dataset:\n\tname: glyphs\n")
    (tmp_path / "stopped" / "creating.json").write_text("")
    images = ("photos/wren/1.jpg", "photos/owl/1.jpg")
    for name in ("kept.csv", "other/notes.txt", *images):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("image,label\n")
    for name in ("embedded", "trained", "gallery"):
        (tmp_path / name).mkdir()
    (tmp_path / "embedded" / "manifest.json").write_text("{}")
    (tmp_path / "trained" / "recipe.yaml").write_text("")
    here: dict[str, Any] = {"python": "3", "platform": "x", "packages": {"torch": "2", "dmlkit": "1"}, "gpu": None}
    Environment(**here, threads=1, command=("dmlkit", "train")).write(tmp_path / "trained" / "environment.json")
    (tmp_path / "gallery" / "gallery.json").write_text("{}")
    model = {key: value for key, value in manifest().items() if key in Description.model_fields}
    (tmp_path / "single").mkdir()
    single = {"format": 1, **model, "run": "run", "thumbnails": False, "threshold": None}
    GalleryManifest.parse(single, "single").write(tmp_path / "single" / "gallery.json")
    for name in ("stored/embeddings.npy", "stored/items.parquet", "stored/manifest.json", "complete/gallery.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "complete" / "versions").mkdir()
    (tmp_path / "study" / "study.json").write_text("")
    recipe = {"training": {"epochs": 4, "select_by": "map@r"}}
    study = {"claim": "Margins matter", "paper": None, "table": None, "protocol": "official", "metrics": ["map@r"]}
    study |= {"seeds": [0, 1], "reference": "a", "expect": [], "variants": {"a": {"": recipe}}}
    (tmp_path / "started" / "study.json").write_text(
        json.dumps({"format": 1, **study, "command": "dmlkit study s.yaml"})
    )
    return tmp_path


READ_HERE = "this command reads this file; choose another"
NO_CLASSES = "no class folders; expected at least two for training and two for testing"
INSIDE = "this is inside photos, where every file is read as data; choose a path outside that folder"
IN_RUN = "this is inside a run ({place}/run); choose a path outside it, or in its "
IN_RUN += "embeddings/, evaluations/, exports/, plots/"
IN_FILE = "x.npy is a file; expected a folder"
IN_GALLERY = "this is inside a gallery ({place}/gallery); choose a path outside it"
OTHER = "--output other: has notes.txt but not"
FOREIGN = "exists and is not a dmlkit run; choose another --output"
USED = (
    "trained: this folder already holds a run; continue it with --resume, replace it with --overwrite, or choose "
    "another --output"
)
WRITTEN = [  # what is in the way of a path that a command writes
    ("train glyphs/triplet -o trained", USED),
    ("train glyphs/triplet -o other", f"other: {FOREIGN}"),
    ("final run -o trained", USED),
    ("final run -o run", "--output run: is the run to train again on every class; expected another folder"),
    ("train glyphs/triplet -o gallery/x", f"--output gallery/x: {IN_GALLERY}"),
    ("embed run photos -o kept.csv", "--output kept.csv: this is a file; expected the name of a folder"),
    ("embed run photos -o photos/x", f"--output photos/x: {INSIDE}"),
    ("gallery create run photos -o gallery", "--output gallery: this is a gallery already; choose a path outside it"),
    ("gallery create run photos -o other", f"{OTHER} an interrupted gallery; choose another --output"),
    ("identify gallery photos -o x.md", "--output x.md: expected a name that ends in .csv, .json, .txt or .html"),
    ("search x.npy x.npy -o run/page.html", f"--output run/page.html: {IN_RUN}"),
    ("identify gallery photos -o photos/answers.csv", f"--output photos/answers.csv: {INSIDE}"),
    ("verify run kept.csv -o kept.csv", f"--output kept.csv: {READ_HERE} --output"),
    ("search x.npy x.npy -o x.npy/a.csv", f"--output x.npy/a.csv: {IN_FILE}"),
    ("report study -o x.txt", "--output x.txt: expected a name that ends in .md or .tex"),
]
READ = [  # what is missing inside a path that a command reads
    ("identify gallery empty", NO_IMAGES),
    ("embed run empty", NO_IMAGES),
    ("calibrate gallery --strangers empty", NO_IMAGES),
    ("eval run empty", f"dataset.root: empty: {NO_CLASSES}"),
    ("start run", "run: is a run; expected a folder with one subfolder per class, or a table"),
    ("start stored", "stored: is a folder of embeddings; expected a folder with one subfolder per class, or a table"),
    ("eval run complete", "complete: is a gallery; expected a folder with one subfolder per class, or a table"),
    ("embed run run", "run: is a run; expected an image, a folder of images, or a table"),
    ("start empty", f"dataset.root: empty: {NO_CLASSES}"),
    ("eval x.npy --labels no.npy", f"no.npy: {NO_LABELS}"),
    ("verify run kept.csv --root no", "no: no such file or folder; expected the folder of the images"),
]
STORED = [  # no network computes where every path holds points
    "search x.npy x.npy",
    "select x.npy --measure",
    "review x.npy x.npy -o new",
]
NO_NETWORK = "applies to a run or an image or a folder of images, but x.npy is a file of vectors; remove this option"
MISTAKES = [
    ("eval run --with run --with run", "--with: given 2 times, but takes one value; give it once"),
    *WRITTEN,
    *READ,
    ("eval none", f"none: {NO_SOURCE}"),
    ("eval half", f"half: {NO_RUN.replace('recipe.yaml or ', '')}"),
    ("embed none x", f"none: {NO_RUN}"),
    ("embed run none", "none: no such file or folder; expected an image, a folder of images, or a table"),
    ("export none --format onnx", "none: no such file or folder; expected a run or a folder of embeddings"),
    ("calibrate empty", f"empty: {NO_RUN}"),
    ("calibrate none", "none: no such file or folder; expected a run or a gallery"),
    ("plot tsne study", "study: expected a run folder, got a study; use dmlkit plot results or dmlkit plot epochs"),
    ("plot results empty", f"empty: {NO_STUDY}"),
    (
        "search empty x.npy",
        "empty: expected a run, a folder of embeddings, a gallery or a file of vectors; embed images with dmlkit embed "
        "first",
    ),
    ("search x.npy none", f"none: {NO_SOURCE.replace('expected ', 'expected an image, a folder of images, ')}"),
    (
        "identify stopped x -o a.csv",
        "stopped: the creation of this gallery was interrupted; rerun the same command to finish it",
    ),
    ("verify run x.npy none.png", "none.png: no such file or folder; expected an image"),
    ("verify run none.csv", "none.csv: no such file or folder; expected two images, or a .csv or .txt file of pairs"),
    ("eval run none", "none: no such file or folder; expected a folder with one subfolder per class, or a table"),
    ("eval run --by none.csv:camera", "none.csv: no such file or folder; expected a table (.csv or .parquet)"),
    ("embed run empty --boxes none", "none: no such file or folder; expected a folder of .txt files or a .json file"),
    (
        "search x.npy images --with local",
        "--with local: only eval, verify and gallery create take patches, which a gallery then compares by itself; "
        "expected a second run",
    ),
    ("compare empty half", f"empty: {NO_RUN}"),
    ("data check none", f"none: {NO_DATA}"),
    ("study none", "none: no such file or folder; expected a study, e.g. recipes/study/mpa.yaml"),
    ("gallery add none images", f"none: {NO_GALLERY}"),
    ("train none", f"none: {NO_RECIPE}"),
    (
        "train glyphs/tripled",
        "glyphs/tripled: no such file; expected a recipe; did you mean glyphs/triplet, which comes with dmlkit?",
    ),
    ("report-bug none.yaml", f"none.yaml: {NO_RECIPE}"),
    ("check broken.yaml", "broken.yaml:2: not valid YAML: found a tab; indent with spaces"),
    ("train glyphs/triplet --device gpu", "--device gpu: expected auto, cpu, cuda, cuda:N or mps"),
    ("status none", "none: no such file or folder; expected a folder that dmlkit study wrote"),
]


@pytest.fixture(scope="module")
def results(place: Path, catalogue: str) -> dict[str, Result]:
    """What each command line of `MISTAKES` said, and the status of a study."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", catalogue)
        commands = ["status started", *(words for words, _ in MISTAKES)]
        return dict(zip(commands, without_torch(place, commands), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_refused_without_torch(results: dict[str, Result], place: Path, words: str, message: str):
    assert (results[words].code, results[words].err) == (2, f"error: {message.replace('{place}', str(place))}\n")


OF_OTHER_SOURCES = [
    *((f"{words} --device cpu", f"--device cpu: {NO_NETWORK}") for words in STORED),
    ("search single photos --with run", f"--with run: single {ONE_RUN}"),
    ("calibrate single --with run", f"--with run: single {ONE_RUN}"),
    ("serve single --with run", f"--with run: single {ONE_RUN}"),
    ("serve embedded --with run", f"--with run: {NO_SECOND}, but embedded is a folder of embeddings; {REMOVE}"),
    ("identify x.npy x.npy --with run", f"--with run: {NO_SECOND}, but x.npy is a file of vectors; {REMOVE}"),
]


@pytest.mark.parametrize(("words", "message"), OF_OTHER_SOURCES)
def test_an_option_of_other_sources_is_refused_before_anything_is_read(words: str, message, place, dmlkit, monkeypatch):
    monkeypatch.chdir(place)
    result = dmlkit(*words.split())
    assert (result.code, result.err) == (2, f"error: {message}\n")


def test_each_option_of_a_path_is_checked_early():
    """A path that a command reads has a callback, one that it writes a mark; the others are checked in its body."""
    later = {"train recipe", "check recipe", "report-bug source", "eval source", "data check target"}
    later |= {"eval evidence", "align output"}  # in the body: a path or a word, and a default that depends on the run
    later |= {"export output"}  # by checks of `dmlkit.files.source`
    later |= {"study output", "train output", "final output"}  # whose default depends on others
    later |= {"copy file", "list root", "gallery remove images", "serve root", "serve review"}  # no torch, or typer's
    unchecked: set[str] = set()
    for name, command in every_command():
        marked = {
            key
            for key, kind in (command.callback.__wrapped__.__annotations__ if command.callback else {}).items()
            if any(isinstance(one, Writes) for one in getattr(kind, "__metadata__", ()))
        }
        for one in command.params:
            is_path = any(word in str(one.metavar) for word in ("FILE", "FOLDER", "PATH", "RUN", "SOURCE", "IMAGE"))
            if is_path and not one.callback and one.name not in marked:
                unchecked.add(f"{name} {one.name}")
    assert unchecked <= later, unchecked - later


def test_every_screen_ends_with_the_same_options():
    last = ["json", "device"]
    for name, command in every_command():
        names = [one.name for one in command.params]
        shared = [one for one in last if one in names]
        assert names[len(names) - len(shared) :] == shared, name


def test_help_after_a_wrong_path_is_help(dmlkit: Cli):
    assert "Usage:" in dmlkit("gallery", "info", "none", "--help").ok().out


@pytest.mark.slow
def test_the_status_of_a_study_needs_no_torch(results: dict[str, Result]):
    result = results["status started"]
    assert result.code == 0 and "Margins matter" in result.out and "0 of 2 runs done" in result.out, result
