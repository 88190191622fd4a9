"""The blocks of a page, and running them one after another in an empty folder."""

import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import ROOT


class Block(NamedTuple):
    kind: str
    body: str


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def blocks_of(text: str, *kinds: str) -> list[Block]:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(kind, body) for kind, body in found if kind in kinds]


def commands_of(body: str) -> list[str]:
    return body.replace("\\\n", " ").splitlines()


def run_blocks(blocks: Iterable[Block], dmlkit: Callable[..., Any], added: Callable[[list[str]], list[str]]) -> str:
    """Write files, run Python and type commands, each with the arguments that ``added`` gives it; what was printed."""
    printed = ""
    for kind, body in blocks:
        named = re.match(r"# (\S+\.(?:yaml|py))\n", body)
        if named:
            Path(named[1]).write_text(body, encoding="utf-8")
        elif kind == "python":
            with redirect_stdout(StringIO()) as out:
                exec(compile(body, "a page of docs", "exec"), {})
            printed += out.getvalue()
        else:
            for line in commands_of(body):
                _, *arguments = shlex.split(line)
                more = added(arguments)  # may change them
                result = dmlkit(*arguments, *more)
                assert result.code == 0, f"{line}\n{result.out}{result.err}"
                printed += result.out
    return printed
