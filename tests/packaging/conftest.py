"""The wheel and the sdist of this tree, and an environment with nothing but what the wheel asks for."""

import email
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist of a copy of the project, without isolation: seconds, and no download."""
    wheels = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    sdists = pytest.importorskip("hatchling.builders.sdist", reason="hatchling is not installed")
    copy, place = tmp_path_factory.mktemp("project"), str(tmp_path_factory.mktemp("dist"))
    for name in ("dmlkit", "recipes", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):  # hatchling leaves out what git ignores
        shutil.copy(ROOT / name, copy)
    (wheel,) = wheels.WheelBuilder(str(copy)).build(directory=place, versions=["standard"])
    (sdist,) = sdists.SdistBuilder(str(copy)).build(directory=place, versions=["standard"])
    return Path(wheel), Path(sdist)


@pytest.fixture(scope="session")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment that holds the wheel and links to what it asks for, without extras."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    paths = sysconfig.get_paths("venv", {"base": str(environment), "platbase": str(environment)})
    with zipfile.ZipFile(built[0]) as wheel:
        (metadata,) = (wheel.read(name) for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    requirements = email.message_from_bytes(metadata).get_all("Requires-Dist", [])
    for path in {path for one in needed(requirements).values() for path in top_levels(one)}:
        (Path(paths["purelib"]) / path.name).symlink_to(path)
    python = Path(paths["scripts"]) / Path(sys.executable).name
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, built[0]], check=True)
    return python.parent


def needed(requirements: Sequence[str], extras: frozenset[str] = frozenset()) -> dict[str, Distribution]:
    """The distributions that requirements bring with these extras, those of theirs included."""
    found, waiting = dict[tuple[str, frozenset[str]], Distribution](), [(requirements, extras)]
    while waiting:
        texts, extras = waiting.pop()
        for requirement in map(Requirement, texts):
            marks = [{"extra": extra} for extra in extras | {""}]
            if requirement.marker is not None and not any(requirement.marker.evaluate(mark) for mark in marks):
                continue
            key = (requirement.name, frozenset(requirement.extras))
            if key not in found:
                found[key] = distribution(requirement.name)
                waiting.append((found[key].requires or [], key[1]))
    return {name: one for (name, _), one in found.items()}


def top_levels(one: Distribution) -> Iterator[Path]:
    """What a distribution put directly into site-packages."""
    for file in one.files or []:
        if file.parts[0] not in ("..", "__pycache__"):
            yield Path(str(one.locate_file(file.parts[0])))
