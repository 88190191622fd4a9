"""One escape a reader: Markdown, LaTeX and spreadsheets, held against what hostile names would do there."""

import csv
import re

import pytest

from dmlkit.files.escape import (
    UNPRINTABLE,
    as_latex,
    as_markdown,
    excerpt,
    latex,
    markdown,
    printable,
    printable_json,
    spreadsheet,
)

HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "](http://evil)",
    "![a](b)",
    "a\\|b",
    "a|b",
    "a\nb",
    "`x`",
    "*x*",
    "&lt;",
    "\x1b[31m",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_text_in_a_cell_of_markdown_s10(name: str):
    line = as_markdown([["run"], [name]]).split("\n")
    assert len(line) == 3
    cell = line[2].removeprefix("| ").removesuffix(" |")
    # what Markdown reads: a backslash before punctuation is dropped, and such punctuation is text
    assert re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell) == printable(name)
    assert not re.search(r"(?<!\\)(?:\\\\)*[<>|\[\]`*&]", cell)


def test_a_word_with_underscores_stays_readable():
    assert markdown("proxy_anchor map@r 0.1 ± 0.2") == "proxy_anchor map@r 0.1 ± 0.2"
    assert markdown("_x_") == r"\_x\_"
    assert markdown("__x__ a__b") == r"\_\_x\_\_ a\_\_b"


def test_a_name_is_text_in_a_cell_of_latex_s10():
    assert latex("a^b~c\\d") == r"a\textasciicircum{}b\textasciitilde{}c\textbackslash{}d"
    assert latex("<x>|") == r"\textless{}x\textgreater{}\textbar{}"
    row = as_latex([["run"], ["[2em]"], ["*"], ["a\nb"]]).split("\n")[4:7]
    assert row == [r"{[}2em] \\", r"{*} \\", r"a\textbackslash{}nb \\"]


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+x", "-x", "@SUM(A1)", "\t=1", "\r=1", "\n=1"])
def test_a_class_name_is_no_formula_s10(name: str, tmp_path):
    assert spreadsheet(name) == f"'{name}"
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerow([spreadsheet(name), -0.5])
    with path.open(newline="") as file:
        assert next(csv.reader(file)) == [f"'{name}", "-0.5"]


@pytest.mark.parametrize("name", ["-1", "+3.5", "-1e-3", "robin", "a=b", ""])
def test_numbers_and_names_stay_as_they_are(name: str):
    assert spreadsheet(name) == name


def test_every_control_character_and_turn_of_writing_is_spelled_out():
    hostile = [
        chr(code) for code in (*range(32), *range(127, 160), 0x61C, *range(0x202A, 0x202F), 0x2066, 0x200F, 0xDC80)
    ]
    assert not any(UNPRINTABLE.search(printable(character)) for character in hostile)
    assert not any(UNPRINTABLE.search(printable_json(character).replace("\n", "")) for character in hostile)
    assert printable("Straße 鳥 🐦 é") == "Straße 鳥 🐦 é"


def test_an_excerpt_tells_the_length():
    assert excerpt("x" * 201) == "x" * 200 + "... (201 characters)"
