"""Files that are whole or not there, whoever else writes them."""

from pathlib import Path

import pytest

from dmlkit.files.atomic import atomic_write


def test_writers_at_once_do_not_meet(tmp_path: Path):
    target = tmp_path / ("long" * 60 + ".txt")  # 244 characters, of 255 that a file system takes
    with atomic_write(target) as first, atomic_write(target) as second:
        first.write_text("first")
        second.write_text("second")
        assert first != second
    assert target.read_text() == "first"  # the last to end
    assert [file.name for file in tmp_path.iterdir()] == [target.name]


def test_what_fails_leaves_the_old_file(tmp_path: Path):
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(target) as partial:
        partial.write_text("ne")
        raise RuntimeError
    assert target.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_writer_left_is_removed_and_what_others_write_is_not(tmp_path: Path):
    mark = "0123456789abcdef" * 2
    others = [f".c.json.{mark}.partial", ".a.json.partial", f"a.json.{mark}.partial", f".a.json.{mark[1:]}.partial"]
    for name in (f".a.json.{mark}.partial", *others):
        (tmp_path / name).touch()
    with atomic_write(tmp_path / "a.json") as first, atomic_write(tmp_path / "a.json") as second:
        assert first.exists() and second.exists()
        second.touch()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*others, "a.json"])
