"""The block of a page that report writes: what stands around it stays, byte for byte."""

from pathlib import Path

import pytest

from dmlkit.errors import UserError
from dmlkit.study.report import BEGINNING, END, text_around, write_block

BLOCK = f"{BEGINNING} a -o b.md -->\n\nold\n\n{END}"


def write(path: Path) -> bytes:
    write_block(path, text_around(path), "new -o b.md", "A title", ["One.", "Two."])
    return path.read_bytes()


NEW = f"{BEGINNING} new -o b.md -->\n\nOne.\n\nTwo.\n\n{END}".encode()
TITLED = NEW.replace(b"One.", b"# A title\n\nOne.")


@pytest.mark.parametrize(
    "before", ["# Own\n\n", "# Own\r\n\r\nText.\r\n", f"# Own\n\n    {BEGINNING} x -->\n    {END}\n\n"]
)
@pytest.mark.parametrize("after", ["", "\n", " and more\n\n## Own\r\n", f"\n\nThe line `{END}` ends it.\n"])
def test_the_text_around_the_block_stays_to_the_byte(tmp_path: Path, before: str, after: str):
    path = tmp_path / "b.md"
    path.write_bytes(f"{before}{BLOCK}{after}".encode())
    assert write(path) == before.encode() + NEW + after.encode()
    assert write(path) == before.encode() + NEW + after.encode()


def test_a_page_without_text_of_its_own_has_a_title(tmp_path: Path):
    path = tmp_path / "b.md"
    assert write(path) == TITLED + b"\n" == write(path)
    path.write_bytes(f"\n{BLOCK}\nbelow".encode())
    assert write(path) == b"\n" + TITLED + b"\nbelow"


def test_what_is_asked_does_not_end_the_comment(tmp_path: Path):
    write_block(tmp_path / "b.md", ("", "\n"), "'a-->\n<b>' -o b.md", "<i>", [])
    first, _, title, *_ = (tmp_path / "b.md").read_text().split("\n")
    assert first == f"{BEGINNING} 'a--&gt;\\n<b&gt;' -o b.md -->" and title == r"# \<i\>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Somebody's\n", "got 0 and 0 such lines"),
        ("", "got 0 and 0 such lines"),
        (f"{BEGINNING} a -o b.md -->\n\nold\n", "got 1 and 0 such lines"),
        (f"# Own\n\n{BEGINNING} a -->\n", "got 1 and 0 such lines"),
        (f"{BLOCK}\n\n{BLOCK}\n", "got 2 and 2 such lines"),
        (f"{BLOCK}\n{END}\n", "got 1 and 2 such lines"),
        (f"{END}\n{BEGINNING} a -->\n", "and below it one"),
        (f"See {BEGINNING} a -->\n", "got 0 and 0 such lines"),
        (f"\udcff{BLOCK}", "is not a UTF-8 text"),
    ],
)
def test_a_page_without_one_block_is_one_line_and_stays(tmp_path: Path, text: str, message: str):
    path = tmp_path / "b.md"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as error:
        text_around(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)
    assert path.read_bytes() == text.encode(errors="surrogateescape")
