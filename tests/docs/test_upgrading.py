"""The page on upgrading names modules that exist."""

import re

from tests.conftest import ROOT

NAME = re.compile(r"`([\w.]+)`")


def is_module(name: str) -> bool:
    path = ROOT / "dmlkit" / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_modules_moved_to_modules_that_exist():
    page = (ROOT / "docs/upgrading.md").read_text("utf-8")
    table = page.partition("## Moved modules")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    targets = {name for _, now in rows for name in NAME.findall(now)}
    assert len(rows) > 90
    assert [name for name in targets if not is_module(name) and not is_module(name.rpartition(".")[0])] == []
    moved = [name for before, _ in rows for name in NAME.findall(before)]
    assert sorted({name for name in moved if moved.count(name) > 1}) == []
