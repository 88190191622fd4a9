"""Escapes for untrusted text, one for each format in which it is shown, so that it cannot act as markup or control.

Tables in Markdown and LaTeX are made here too, of cells that are escaped.
"""

import re
import shlex
from collections.abc import Collection
from pathlib import Path

EXCERPT = 200  # characters of a value that a message shows
# Control characters, marks that change the direction of writing, other line separators, and bytes that are not text.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MARKDOWN = re.compile(r"[\\`*\[\]<>|&#!~]|(?<![^\W_])_|_(?![^\W_])")  # the _ of a_b is not markup
LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
    | {'"': r"\char34{}"}  # which babel makes a command in some languages
    | {"[": "{[}", "*": "{*}"}  # after the \\ of the row before they would be its options
)
LIGATURES = re.compile(r"([-`',])(?=\1)|[!?](?=`)")  # pairs that TeX prints as one other character, e.g. -- as a dash
Rows = list[list[str]]
ESCAPED = re.compile("^'('*[=+@\t\r\n-])")
"""A cell that `spreadsheet` has escaped, which a reader replaces by the group."""
NUMBER = r"[+-]?[0-9]+(?:\.[0-9]+)?"
FIGURE = re.compile(rf"({NUMBER})(?: (±|\.\.) ({NUMBER}))?")  # a number, one with its margin, or an interval
LATEX_WORDS = {"±": r"$\pm$", "..": "to"}


def excerpt(text: str, most: int = EXCERPT) -> str:
    """Cut text of more than ``most`` characters and append its length.

    Example:
        >>> excerpt("short"), excerpt("9" * 5000, most=4)
        ('short', '9999... (5,000 characters)')
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def quoted(value: object, most: int = EXCERPT) -> str:
    """Return a value of a file for messages, shortened, because it may be as long as the file."""
    return excerpt(repr(value), most)


def command_word(path: Path | str) -> str:
    """Return a path as one word of a command that is shown to be typed in a shell.

    Example:
        >>> command_word("runs/a"), command_word("my birds"), command_word("-a.yaml")
        ('runs/a', "'my birds'", './-a.yaml')
    """
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


def printable(text: str) -> str:
    """Escape text for a line in a terminal: control characters are spelled out."""
    return UNPRINTABLE.sub(lambda match: repr(match[0])[1:-1], text)


def printable_json(text: str) -> str:
    r"""Escape JSON for a terminal: control characters that JSON allows in strings become ``\uXXXX``."""
    return "\n".join(UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", line) for line in text.split("\n"))


def markdown(text: str) -> str:
    """Escape text for a line or a cell of Markdown, so that it is no link, HTML or other markup."""
    return MARKDOWN.sub(r"\\\g<0>", printable(text))


def latex(text: str) -> str:
    r"""Escape text for a cell of a LaTeX table.

    Example:
        >>> print(latex("50 % of a_b^c"))
        50 \% of a\_b\textasciicircum{}c
    """
    return LIGATURES.sub(r"\g<0>{}", printable(text).translate(LATEX))


def spreadsheet(text: str) -> str:
    """Escape text for a cell of a CSV table: a formula gets an apostrophe in front; numbers stay numbers."""
    if not ESCAPED.match(f"'{text}"):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def unambiguous(text: str) -> str:
    """Escape text for a cell of a table of data, if a reader would take its apostrophe for that of `spreadsheet`.

    Example:
        >>> unambiguous("@4.png"), unambiguous("'@4.png")
        ('@4.png', "''@4.png")
    """
    return f"'{text}" if ESCAPED.match(text) else text


def near_path(path: str) -> str:
    """Return a path relative to the working directory if it is inside it, else unchanged.

    Example:
        >>> near_path("/elsewhere/runs/a"), near_path(str(Path.cwd() / "runs" / "a"))
        ('/elsewhere/runs/a', 'runs/a')
    """
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def as_markdown(rows: Rows) -> str:
    r"""Format rows as a Markdown table.

    Example:
        >>> print(as_markdown([["run", "map@r"], ["a|b", "0.5"]]))
        | run | map@r |
        | --- | --- |
        | a\|b | 0.5 |
    """
    cells = [[markdown(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [cells[0], ["---"] * len(cells[0]), *cells[1:]])


def as_latex(rows: Rows, *, columns: str = "", bold: Collection[tuple[int, int]] = ()) -> str:
    r"""Format rows as a LaTeX ``tabular`` with the rules of booktabs; negative numbers get a minus sign, not a hyphen.

    Args:
        columns: columns of the tabular. Default: all are left-aligned.
        bold: cells whose number is bold, as indices of row and column.

    Example:
        >>> print(as_latex([["run", "map@r"], ["a_b", "-0.5 ± 0.1"]], bold=[(1, 1)]))
        \begin{tabular}{ll}
        \toprule
        run & map@r \\
        \midrule
        a\_b & \textbf{$-$0.5} $\pm$ 0.1 \\
        \bottomrule
        \end{tabular}
    """
    cells = [[_latex_cell(cell, (i, j) in bold) for j, cell in enumerate(row)] for i, row in enumerate(rows)]
    lines = [" & ".join(row) + r" \\" for row in cells]
    head = [rf"\begin{{tabular}}{{{columns or 'l' * len(rows[0])}}}", r"\toprule", lines[0], r"\midrule"]
    return "\n".join([*head, *lines[1:], r"\bottomrule", r"\end{tabular}"])


def _latex_cell(text: str, is_bold: bool) -> str:
    match = FIGURE.fullmatch(text)
    if match is None:
        return latex(text)
    number, word, other = ((part or "").replace("-", "$-$") for part in match.groups())
    number = rf"\textbf{{{number}}}" if is_bold else number
    return f"{number} {LATEX_WORDS[word]} {other}" if word else number
