"""Pictures as files: their size, and what may be replaced."""

from pathlib import Path

import pytest
from PIL import Image

from dmlkit.errors import UserError
from dmlkit.files.outputs import is_our_picture
from dmlkit.files.pictures import check_picture, distinct_tails, picture, shortened, shortened_apart


@pytest.mark.parametrize("suffix", [".png", ".SVG", ".pdf"])
def test_a_picture_is_known_again_and_may_be_drawn_anew(tmp_path: Path, suffix: str):
    path = tmp_path / "new" / f"p{suffix}"
    check_picture(path)
    with picture(path, 40) as figure:
        figure.subplots().set(title="$x \\ud83d")
    assert is_our_picture(path) and list(path.parent.iterdir()) == [path]
    check_picture(path)


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
    with pytest.raises(UserError, match="is a file; expected"), picture(tmp_path / "file" / "p.png", 40) as figure:
        figure.subplots()


def test_another_suffix_and_somebody_elses_file_are_refused(tmp_path: Path):
    for name in ("p.jpg", "p", "p.png.gz"):
        with pytest.raises(UserError, match=r"expected a file name that ends in \.png, \.svg or \.pdf"):
            check_picture(tmp_path / name)
    (tmp_path / "p.pdf").write_bytes(b"%PDF-1.4 of somebody else")
    with pytest.raises(UserError, match="exists already"):
        check_picture(tmp_path / "p.pdf")


@pytest.mark.parametrize("most", range(1, 24))
def test_a_shortened_name_has_room(most: int):
    assert len(shortened("Golden-Delicious-Apples", most)) <= most


def test_names_that_would_look_the_same_are_told_apart():
    names = ["God-Morgon-Orange-Red-Grapefruit-Juice", "God-Morgon-Red-Grapefruit-Juice", "a\x1b[31m" * 9]
    told = shortened_apart(names, 20)
    assert len(set(told)) == 3 and max(map(len, told)) <= 21 and "\x1b" not in "".join(told)


def test_paths_are_told_apart_by_their_ends():
    assert distinct_tails([Path("a/run"), Path("b/run"), Path("b/c")]) == ["a/run", "b/run", "c"]
    assert distinct_tails([Path("a/run")]) == ["run"]
