"""A wrong path is refused before torch is imported, which takes seconds; commands that only read need no torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Result

Cli = Callable[..., Result]
NO_RUN = "no run here (recipe.yaml or environment.json is missing); expected a folder that train wrote"
NO_SOURCE = "no such file or folder; expected a run, a folder of embeddings, a gallery or an .npy file"
NO_DATA = (
    "no such file or folder; expected a folder with one subfolder per class, a table (.csv or .parquet) or a recipe "
    "(.yaml)"
)
NO_GALLERY = "no gallery here (gallery.json is missing); expected a folder that dmlkit gallery create wrote"
NO_STUDY = "is not a study (study.json is missing); expected a folder that dmlkit study wrote"
NO_RECIPE = "no such file; expected a recipe or a name that dmlkit list recipes shows"
COMMANDS = """
import json, os, sys, pydantic, rich.console, yaml  # each command would import them anew
from dmlkit.cli.app import main

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
    """A folder with an array, an empty folder, half a run, half a gallery and what looks like a study."""
    tmp_path = tmp_path_factory.mktemp("place")
    np.save(tmp_path / "x.npy", np.eye(4, dtype=np.float32))
    for name in ("empty", "half", "run", "stopped", "study"):
        (tmp_path / name).mkdir()
    for name in ("half/recipe.yaml", "run/recipe.yaml", "run/environment.json"):
        (tmp_path / name).touch()
    (tmp_path / "wrong.yaml").write_text("dataset: {name: glyphs}\nloss: {name: triplet, margn: 0.2}\n")
    (tmp_path / "broken.yaml").write_text("dataset:\n\tname: glyphs\n")
    (tmp_path / "stopped" / "creating.json").write_text("")
    (tmp_path / "study" / "study.json").write_text("")
    return tmp_path


MISTAKES = [
    ("eval none", f"none: {NO_SOURCE}"),
    ("eval half", f"half: {NO_RUN}"),
    ("embed none x", f"none: {NO_RUN}"),
    ("embed run none", "none: no such file or folder; expected an image, a folder of images, or a table"),
    ("export none --format onnx", f"none: {NO_RUN}"),
    ("export x.npy --format onnx", "x.npy: expected a run, since --format onnx exports a model; got an .npy file"),
    (
        "export run --format npz",
        "run: is a run; --format npz exports a folder of embeddings: run dmlkit embed run first",
    ),
    (
        "export empty --format npz",
        "empty/manifest.json: missing; expected a manifest of embeddings that dmlkit wrote",
    ),
    ("calibrate empty", f"empty: {NO_RUN}"),
    ("inspect none -o page.html", f"none: {NO_SOURCE}"),
    ("plot pca none", f"none: {NO_RUN}"),
    ("plot tsne study", "study: expected a run folder, got a study; use dmlkit plot results or dmlkit plot epochs"),
    ("plot epochs half", f"half: {NO_RUN}"),
    ("plot epochs study none", f"study: {NO_RUN}"),
    ("plot results none", "none: expected a study folder, written by dmlkit study; a run has dmlkit plot epochs"),
    ("cluster none --clusters 2", f"none: {NO_SOURCE}"),
    ("duplicates none --threshold 0.9", f"none: {NO_SOURCE}"),
    ("duplicates x.npy none --threshold 0.9", f"none: {NO_SOURCE}"),
    ("curvature none", f"none: {NO_SOURCE}"),
    (
        "search empty x.npy",
        "empty: expected a run, a folder of embeddings, a gallery or an .npy file; embed images with dmlkit embed "
        "first",
    ),
    ("search x.npy none", f"none: {NO_SOURCE.replace('expected ', 'expected an image, a folder of images, ')}"),
    ("search x.npy x.npy --run none", f"none: {NO_RUN}"),
    ("identify none x.npy -o answers.csv", f"none: {NO_SOURCE}"),
    (
        "identify stopped x -o a.csv",
        "stopped: the creation of this gallery was interrupted; rerun the same command to finish it",
    ),
    ("verify none a.png b.png", f"none: {NO_RUN}"),
    ("verify run x.npy none.png", "none.png: no such file or folder; expected an image"),
    ("verify run --pairs none.csv", "none.csv: no such file or folder; expected a .csv or .txt file of pairs"),
    ("eval run --dataset-root none", "none: no such file or folder; expected a folder with one subfolder per class"),
    ("eval run --by camera --table none", "none: no such file or folder; expected a table (.csv or .parquet)"),
    (
        "calibrate run --strangers none",
        "none: no such file or folder; expected an image, a folder of images, or a table",
    ),
    ("embed run empty --boxes none", "none: no such file or folder; expected a folder of .txt files or a .json file"),
    ("search x.npy images --with local", "--with local: only eval compares patches; expected a second run"),
    ("compare empty half", f"empty: {NO_RUN}"),
    ("data check empty --model none --threshold 0.9", f"none: {NO_RUN}"),
    ("data check none", f"none: {NO_DATA}"),
    ("data shards none -o new", f"none: {NO_DATA}"),
    ("study none", "none: no such file; expected a study, e.g. recipes/study/mpa.yaml"),
    ("start none", "none: no such file or folder; expected a folder with one subfolder per class, or a table"),
    ("gallery create none -o new", f"none: {NO_RUN}"),
    ("gallery add none images", f"none: {NO_GALLERY}"),
    ("gallery remove none --label robin", f"none: {NO_GALLERY}"),
    ("gallery info none", f"none: {NO_GALLERY}"),
    ("gallery history none", f"none: {NO_GALLERY}"),
    ("gallery restore none 2", f"none: {NO_GALLERY}"),
    ("gallery compact none", f"none: {NO_GALLERY}"),
    ("gallery index empty", f"empty: {NO_GALLERY}"),
    ("train none", f"none: {NO_RECIPE}"),
    (
        "train glyphs/tripled",
        "glyphs/tripled: no such file; expected a recipe; did you mean glyphs/triplet, which comes with dmlkit?",
    ),
    ("check none.yaml", f"none.yaml: {NO_RECIPE}"),
    ("check broken.yaml", "broken.yaml:2: not valid YAML: found a tab; indent with spaces"),
    (
        "train glyphs/triplet --set loss.margin",
        "--set loss.margin: expected key.subkey=value, e.g. --set loss.margin=0.2",
    ),
    ("train wrong.yaml", "wrong.yaml:2: loss.margn: unknown key; did you mean 'margin'?"),
    (
        "check wrong.yaml --set loss.name=triplt",
        "--set loss.name=triplt: loss.name: unknown loss 'triplt'; did you mean 'triplet'? or load its file with "
        "--plugin FILE",
    ),
    ("protocol official none -o new", f"none: {NO_RECIPE}"),
    ("data cache wrong.yaml -o new", "wrong.yaml:2: loss.margn: unknown key; did you mean 'margin'?"),
    ("data check wrong.yaml", "wrong.yaml:2: loss.margn: unknown key; did you mean 'margin'?"),
    ("eval none --untrained", f"none: {NO_RECIPE}"),
    ("status none", f"none: {NO_STUDY}"),
    ("report study empty -o page.md", f"empty: {NO_STUDY}"),
]


@pytest.fixture(scope="module")
def results(place: Path, catalogue: str) -> dict[str, Result]:
    """What each command line of `MISTAKES` said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", catalogue)
        commands = [words for words, _ in MISTAKES]
        return dict(zip(commands, without_torch(place, commands), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_refused_without_torch(results: dict[str, Result], words: str, message: str):
    assert (results[words].code, results[words].err) == (2, f"error: {message}\n")


@pytest.mark.parametrize("words", ["embed none --help", "gallery info none --help", "plot epochs none --help"])
def test_help_after_a_wrong_path_is_help(dmlkit: Cli, words: str):
    result = dmlkit(*words.split())
    assert result.code == 0 and "Usage:" in result.out


@pytest.mark.slow
def test_the_status_of_a_study_needs_no_torch(tmp_path: Path):
    recipe = {"training": {"epochs": 4, "select_by": "map@r"}}
    study = {"claim": "Margins matter", "paper": None, "table": None, "protocol": "official", "metrics": ["map@r"]}
    study |= {"seeds": [0, 1], "reference": "a", "expect": [], "variants": {"a": {"": recipe}}}
    record = {"format": 2, "study": study, "command": "dmlkit study s.yaml"}
    (tmp_path / "study.json").write_text(json.dumps(record))
    (result,) = without_torch(tmp_path, [f"status {tmp_path}"])
    assert result.code == 0 and "Margins matter" in result.out and "0 of 2 runs done" in result.out, result
