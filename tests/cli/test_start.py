"""The first recipe: written again as long as it is as written, and never over what a user has put into it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dmlkit.recipe.file import read_recipe
from tests.datasets import trees

EDITS: dict[str, Callable[[str], str]] = {
    "a value": lambda text: text.replace("epochs: 20", "epochs: 5"),
    "a comment at the end": lambda text: f"{text}# my notes\n",
    "a comment before": lambda text: f"# my notes\n{text}",
    "the first line": lambda text: text.replace("A first recipe", "My recipe"),
    "the checksum": lambda text: text.replace("(sha256 ", "(sha256 0"),
    "no checksum, as older ones": lambda text: f"{text.partition(' (sha256')[0]}\n{text.partition(chr(10))[2]}",
    "nothing but the first line left": lambda text: text.partition("\n")[0],
}


@pytest.fixture
def birds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos of 4 classes, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        trees.photo(Path("birds") / f"class_{number % 4}" / f"{number}.png", number)
    return Path("birds")


def test_an_untouched_recipe_is_written_again_also_where_the_photos_have_changed(dmlkit, birds: Path):
    assert dmlkit("start", birds, "--device", "cpu").code == 0
    first = Path("birds.yaml").read_text()
    assert read_recipe(Path("birds.yaml")).dataset.name == "folder" and "6 training photos of 2 classes" in first
    assert dmlkit("start", birds, "--device", "cpu").code == 0
    assert Path("birds.yaml").read_text() == first
    for label in range(4):
        trees.photo(birds / f"class_{label}" / "more.png", 20 + label)
    assert dmlkit("start", birds, "--device", "cpu").code == 0
    assert "8 training photos of 2 classes" in Path("birds.yaml").read_text()


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_recipe_is_refused_and_stays(dmlkit, birds: Path, edit: Callable[[str], str]):
    assert dmlkit("start", birds, "--device", "cpu").code == 0
    path = Path("birds.yaml")
    edited = edit(path.read_text())
    assert edited != path.read_text()
    path.write_text(edited)
    result = dmlkit("start", birds, "--device", "cpu")
    assert result.code == 2 and result.err.count("\n") == 1, result.err
    assert result.err.startswith("error: --output birds.yaml: ") and "choose another --output" in result.err
    assert path.read_text() == edited
    assert dmlkit("start", birds, "-o", "other.yaml", "--device", "cpu").code == 0
