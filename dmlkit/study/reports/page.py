"""The block of a page that ``dmlkit report`` writes; the text around it is somebody's own, and stays."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import markdown, printable
from dmlkit.files.outputs import check_output, writing

BEGINNING = "<!-- Written by: dmlkit report"  # of the block's first line, which goes on with what was asked
END = "<!-- End of what dmlkit report wrote -->"


@dataclass(frozen=True)
class ReportPage:
    """A Markdown file, in three.

    Args:
        path: of the file; need not exist.
        before: the text above the block.
        block: from the line of `BEGINNING` to that of `END`; empty where there is no page yet.
        after: the text below.
    """

    path: Path
    before: str = ""
    block: str = ""
    after: str = "\n"

    @classmethod
    def at(cls, path: Path) -> "ReportPage":
        """The page of a file. One that begins with a block without an end is of an older dmlkit, and all block.

        Raises:
            UserError: the file is somebody else's, or has not one beginning and below it one end.
        """
        check_output(path, lambda path: BEGINNING.encode() in path.read_bytes())
        if not path.exists():
            return cls(path)
        try:
            text = path.read_bytes().decode("utf-8")  # as bytes: ends of lines around the block stay what they are
        except UnicodeDecodeError as error:
            raise UserError(f"--output {path}: cannot read this page: {error}") from None
        begins, ends = (
            [found.span() for found in re.finditer(f"^{re.escape(mark)}", text, re.MULTILINE)]
            for mark in (BEGINNING, END)
        )
        if not ends and [begin for begin, _ in begins] == [0]:
            return cls(path, block=text)
        if len(begins) != 1 or len(ends) != 1 or begins > ends:
            raise UserError(
                f"--output {path}: expected one line that begins with '{BEGINNING}' and below it one '{END}', between "
                f"which the report is written; got {len(begins)} and {len(ends)} of them"
            )
        (begin, _), (_, end) = *begins, *ends
        return cls(path, text[:begin], text[begin:end], text[end:])

    @property
    def text(self) -> str:
        """All of the file."""
        return self.before + self.block + self.after

    def write(self, asked: str, title: str, paragraphs: Sequence[str]) -> None:
        """Replace the block, all or nothing.

        Args:
            asked: the words of the command that writes it.
            title: of the page; below text it is left out, which has a title of its own.
            paragraphs: of Markdown.
        """
        head = [f"{BEGINNING} {printable(asked).replace('>', '&gt;')} -->"]
        if not self.before.strip():
            head.append(f"# {markdown(title)}")
        block = "\n\n".join([*head, *paragraphs, END])
        with writing(self.path), atomic_write(self.path) as partial:
            partial.write_bytes(f"{self.before}{block}{self.after}".encode())
