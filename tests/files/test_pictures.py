"""Pictures as files: their names and sizes."""

from pathlib import Path

import pytest
from PIL import Image

from dmlkit.errors import UserError
from dmlkit.files.pictures import picture, shortened, shortened_apart


@pytest.mark.parametrize("suffix", [".png", ".SVG", ".pdf"])
def test_a_picture_is_drawn_and_replaced(tmp_path: Path, suffix: str):
    path = tmp_path / "new" / f"p{suffix}"
    for _ in range(2):
        with picture(path, 40) as figure:
            figure.subplots().set(title="$x \\ud83d")
    assert list(path.parent.iterdir()) == [path]


def test_a_picture_is_as_wide_as_a_column(tmp_path: Path):
    with picture(tmp_path / "p.png", 40) as figure:
        figure.subplots()
    width, height = Image.open(tmp_path / "p.png").size
    assert (width, height) == (int(80 / 25.4 * 300), int(40 / 25.4 * 300))


def test_what_fails_leaves_nothing(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), picture(tmp_path / "p.png", 40):
        _ = 1 / 0
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write this file"), picture(tmp_path / "file" / "p.png", 40) as figure:
        figure.subplots()


def test_a_shortened_name_has_room():
    assert all(len(shortened("Golden-Delicious-Apples", most)) <= most for most in range(1, 24))


def test_names_that_would_look_the_same_are_told_apart():
    names = ["God-Morgon-Orange-Red-Grapefruit-Juice", "God-Morgon-Red-Grapefruit-Juice", "a\x1b[31m" * 9]
    names = shortened_apart(names, 20)
    assert len(set(names)) == 3 and max(map(len, names)) <= 21 and "\x1b" not in "".join(names)
