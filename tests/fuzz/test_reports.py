r"""Reports of hostile claims and names: what a reader of Markdown or LaTeX sees is the text, and nothing is obeyed.

Markdown is read by markdown-it, LaTeX by the few rules that its special characters have.
"""

import json
import re
from collections.abc import Callable
from contextlib import chdir
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from dmlkit.files.escape import as_latex, as_markdown, printable
from tests.fuzz.conftest import Workplace, examples

ODD = (
    *("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a|b", "a\nb", "a\r\n\r\n# b", "\x1b[31m"),
    *("\u202egnp", "\x00", "\ud800", "[x](javascript:alert(1))", "![x](http://x/y.png)", "<!-- x", "-->", "&lt;&copy;"),
    *("`x`", "```", "**x**", "_x_", "~~x~~", "---", "\\", "\\|", "\\\\", "<http://x>", "$x^$", "&%$#_{}~^\\", "*"),
    *("[b]x[/b]", "|", "[^1]", "&#0;"),
    *("# x", "1. x", "- x", "> x", "    x", "x" * 3000, "50 % of \\input{/etc/passwd}", "{\\bf x}", "x  \n", "%s {0}"),
    *("End of what dmlkit report wrote -->", "<!-- Written by: dmlkit report", "::: x", "[x]: y", "\u2028x"),
)
texts = (
    st.sampled_from(ODD) | st.text(min_size=1, max_size=20) | st.lists(st.sampled_from(ODD), max_size=3).map("".join)
).filter(bool)
valid = texts.filter(lambda text: text.encode("utf-8", "ignore").decode() == text)
"""What JSON can hold."""
TAGS = {"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "img", "pre", "code"}


class Read(HTMLParser):
    """A page as a browser reads it: its tags, the text of its cells, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.comments: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tags[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


def read(markdown: str) -> Read:
    """Markdown with tables and what is struck out, as GitHub shows it; HTML in it is HTML."""
    return Read(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(markdown))


def bare(text: str) -> str:
    """Text as dmlkit spells it, without white space, which Markdown joins."""
    return "".join(printable(text).split())


@pytest.mark.heavy
@examples(80, 3_000)
@given(table=st.lists(st.lists(texts, min_size=3, max_size=3), min_size=2, max_size=4))
def test_a_markdown_table_shows_its_cells(table: list[list[str]]):
    page = read(as_markdown(table))
    assert [["".join(cell.split()) for cell in row] for row in page.rows] == [
        [bare(cell) for cell in row] for row in table
    ]
    assert {tag.strip("/") for tag in page.tags} <= {"table", "thead", "tbody", "tr", "th", "td"} and not page.comments


NAMED = {
    **{r"\textbackslash{}": "\\", r"\textasciicircum{}": "^", r"\textasciitilde{}": "~", "{[}": "[", "{*}": "*"},
    **{r"\textless{}": "<", r"\textgreater{}": ">", r"\textbar{}": "|"},
    **{f"\\{character}": character for character in "&%$#_{}"},
    **{f"{character}{{}}": character for character in "-`',!?"},  # no ligature with the next one
    **{r"\char34{}": '"', "$-$": "-", r"$\pm$": "±"},
}
TOKEN = re.compile("|".join(map(re.escape, sorted(NAMED, key=len, reverse=True))) + r"|[^\\&%$#_{}^~]", re.DOTALL)


@pytest.mark.heavy
@examples(80, 3_000)
@given(table=st.lists(st.lists(texts, min_size=3, max_size=3), min_size=2, max_size=4))
def test_a_latex_table_shows_its_cells(table: list[list[str]]):
    lines = [line for line in as_latex(table).split("\n") if line.endswith(r" \\")]
    cells = [line.removesuffix(r" \\").split(" & ") for line in lines]
    for row, (line, given_row) in zip(cells, zip(lines, table, strict=True), strict=True):
        assert len(row) == 3, line
        for cell, text in zip(row, given_row, strict=True):
            tokens = TOKEN.findall(cell)
            assert "".join(tokens) == cell  # nothing stands unescaped
            assert "".join(NAMED.get(token, token) for token in tokens) == printable(text)


@pytest.fixture(scope="module")
def workplace(ground: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(ground / "study", tmp_path_factory.mktemp("reports") / "study")


def renamed(data: Any, names: dict[str, str]) -> Any:
    """Data of a document, with other names."""
    if isinstance(data, dict):
        return {names.get(key, key): renamed(value, names) for key, value in data.items()}
    if isinstance(data, list):
        return [renamed(value, names) for value in data]
    return names.get(data, data) if isinstance(data, str) else data


@pytest.mark.heavy
@examples(40, 300)
@given(
    claim=valid,
    paper=st.none() | valid,
    names=st.tuples(valid, valid).filter(lambda names: names[0] != names[1]),
    repeat=valid,
    is_of_paper=st.booleans(),
)
def test_a_report_shows_what_a_study_says_and_obeys_nothing(
    claim: str,
    paper: str | None,
    names: tuple[str, str],
    repeat: str,
    is_of_paper: bool,
    workplace: Workplace,
    command: Callable[..., tuple[int, str]],
):
    folder = workplace.whole()
    both = dict(zip(("small", "large"), names, strict=True))
    for file in ("results.json", "study.json"):
        data = renamed(json.loads((folder / file).read_text()), both)
        data |= {"command": repeat, "claim": claim, "paper": paper}
        for statement in data.get("verdicts", ()):
            statement["paper"] = paper
        (folder / file).write_text(json.dumps(data))
    words = ["report", str(folder), "-o", "report.md"]
    if is_of_paper and paper:
        words += [f"--paper={paper}"]
    with chdir(folder):
        code, said = command(*words)
    assert code == 0, said
    text = (folder / "report.md").read_text()
    page = read(text)
    listed = {"strong", "a", "ul", "li"} if is_of_paper else set[str]()
    assert {tag.strip("/") for tag in page.tags} <= TAGS | listed, page.tags
    assert len(page.comments) == 2 and {name for name, _ in page.attributes} <= {"src", "href", "alt", "style"}
    sources = [value for name, value in page.attributes if name in ("src", "href")]
    assert all(re.fullmatch(r"report/study\.png", str(source)) for source in sources)
    seen = "".join(page.text.split())
    shown = (*names, repeat) if is_of_paper and paper else (claim, *names, repeat)  # a paper's page has statements
    assert all(bare(one) in seen for one in shown)
    with chdir(folder):  # the block is found again
        assert command(*words)[0] == 0
    assert (folder / "report.md").read_text() == text
