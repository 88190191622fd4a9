"""Wheel and sdist hold what they should."""

import email
import shutil
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(built: tuple[Path, Path]) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(built[0]) as archive:
        yield archive


def test_both_hold_exactly_the_tracked_modules(built: tuple[Path, Path], wheel: zipfile.ZipFile, tracked: list[str]):
    assert built[0].stat().st_size <= 1_500_000
    folders = {name.partition("/")[0] for name in wheel.namelist()}
    assert folders == {"dmlkit", f"dmlkit-{PROJECT['version']}.dist-info"}
    expected = {name for name in tracked if name.startswith("dmlkit/")}
    assert "dmlkit/py.typed" in expected
    with tarfile.open(built[1]) as archive:
        files = [name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()]
    needed = {name for name in tracked if name.startswith("recipes/")} | {"pyproject.toml", "README.md", "LICENSE"}
    assert needed <= {*files}  # a wheel can be built from it
    for names in (wheel.namelist(), files):
        assert {name for name in names if name.startswith("dmlkit/") and "/_recipes/" not in name} == expected


def test_every_recipe_is_in_it_as_it_is(wheel: zipfile.ZipFile):
    for path in (ROOT / "recipes").rglob("*.yaml"):
        assert wheel.read(f"dmlkit/_recipes/{path.relative_to(ROOT / 'recipes')}") == path.read_bytes()


def test_its_metadata_and_entry_point_are_those_of_the_project(wheel: zipfile.ZipFile):
    folder = f"dmlkit-{PROJECT['version']}.dist-info"
    metadata = email.message_from_bytes(wheel.read(f"{folder}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("dmlkit", PROJECT["version"])
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert len([line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]) == len(
        PROJECT["dependencies"]
    )
    assert "dmlkit = dmlkit.__main__:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert any(name.endswith("LICENSE") for name in wheel.namelist())


def test_what_the_dockerfile_copies_makes_the_same_wheel(wheel: zipfile.ZipFile, tmp_path: Path):
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = [line.split()[1:] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line]
    for *sources, target in copied:
        for source in sources:
            if (ROOT / source).is_dir():  # its contents, as COPY does
                shutil.copytree(ROOT / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed").WheelBuilder
    (built,) = builder(str(tmp_path)).build(directory=str(tmp_path / "dist"), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        assert sorted(archive.namelist()) == sorted(wheel.namelist())
