"""One escape a reader: Markdown, LaTeX and spreadsheets, held against what hostile names would do there."""

import json
import re
import unicodedata

import pytest

from dmlkit.files.escape import as_latex, as_markdown, latex, markdown, printable, printable_json, spreadsheet

HOSTILE = [
    *("<img src=x onerror=alert(1)>", "](http://evil)", "![a](b)", "a\\|b", "a|b"),
    *("a\nb", "`x`", "*x*", "&lt;", "\x1b[31m"),
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
def test_a_class_name_is_no_formula_s10(name: str):
    assert spreadsheet(name) == f"'{name}"


@pytest.mark.parametrize("name", ["-1", "+3.5", "-1e-3", "robin", "a=b", ""])
def test_numbers_and_names_stay_as_they_are(name: str):
    assert spreadsheet(name) == name


def test_every_control_character_and_turn_of_writing_is_spelled_out():
    """Those of Unicode: control, surrogate and separating characters, and those that turn the text after them."""
    marks = "\u061c\u200e\u200f"
    turning = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    hostile = [
        character
        for character in map(chr, range(0x10000))
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(character) in turning
        or character in marks
    ]
    assert len(hostile) == 65 + 2048 + 2 + 9 + 3
    for character in hostile:
        assert printable(character).isascii() and printable(character).isprintable()
        if character != "\n":  # which JSON has between its keys
            shown = printable_json(f'"{character}"')
            assert shown.isascii() and shown.isprintable() and json.loads(shown) == character
    assert printable("Straße 鳥 🐦 é") == "Straße 鳥 🐦 é"
