"""Files that are whole or not there, whoever else writes them."""

from pathlib import Path

import pytest

from dmlkit.files.atomic import atomic_write, remove_partials


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


def test_only_partials_of_these_names_are_removed(tmp_path: Path):
    mark = "0123456789abcdef" * 2
    ours = [f".a.json.{mark}.partial", f".b.{mark}.partial"]
    others = [f".c.json.{mark}.partial", ".a.json.partial", f"a.json.{mark}.partial", f".a.json.{mark[1:]}.partial"]
    for name in (*ours, *others, "a.json"):
        (tmp_path / name).touch()
    remove_partials(tmp_path, "a.json", "b")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*others, "a.json"])
    remove_partials(tmp_path / "missing", "a.json")
