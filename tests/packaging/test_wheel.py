"""The wheel holds what it should. `make wheel` is the whole proof: it installs the wheel elsewhere, and runs it."""

import email
import shutil
import tomllib
import zipfile
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

wheel_builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Built from a copy of what the wheel is of, without isolation: seconds, and no download."""
    copy, built = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("dist")
    for name in ("dmlkit", "recipes", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (path,) = wheel_builder.WheelBuilder(str(copy)).build(directory=str(built), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_every_module_and_no_test_is_in_it(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "dmlkit").rglob("*.py")}
    assert package | {"dmlkit/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} == {"dmlkit", f"dmlkit-{PROJECT['version']}.dist-info"}
    assert [name for name in names if "__pycache__" in name or "/test_" in name] == []


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
    assert "dmlkit = dmlkit.cli.app:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert any(name.endswith("LICENSE") for name in wheel.namelist())
