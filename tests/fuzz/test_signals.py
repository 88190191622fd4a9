"""Ctrl-C and SIGTERM at random moments in every command: a documented exit code, and the command works after it."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import chdir
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from tests.fuzz.conftest import FULL
from tests.fuzz.test_kills import WRITERS, contents
from tests.processes import Forked, command_line

READERS: dict[str, tuple[str, ...]] = {
    "cluster": ("cluster", "run", "-k", "2"),
    "compare": ("compare", "run", "study/runs/small/seed-0"),
    "curvature": ("curvature", "run"),
    "data check": ("data", "check", "photos.yaml"),
    "duplicates": ("duplicates", "run", "--threshold", "0.9"),
    "inspect": ("inspect", "run", "-o", "new.html"),
    "list": ("list", "losses"),
    "start": ("start", "photos", "-o", "new.yaml"),
    "gallery create": ("gallery", "create", "run", "photos", "-o", "new"),
    "search": ("search", "gallery", "photos/ant", "-o", "new.csv"),
}
RANDOM = ("new/versions/", "new/vectors/", "new/gallery.json")  # names and times
COMMANDS = {**WRITERS, **READERS}
TIMES = 2 if FULL else 1


def stopped(folder: str, number: int, seconds: float, *words: str) -> None:
    """A command that gets a signal after some seconds, unless it has ended before; a file has how long it took."""
    begun, timer = time.monotonic(), Timer(seconds, os.kill, (os.getpid(), number))
    timer.start()
    try:
        with chdir(folder):
            command_line(*words)
    finally:
        timer.cancel()
        Path(f"{folder}.seconds").write_text(str(time.monotonic() - begun))


@pytest.mark.heavy
@pytest.mark.usefixtures("pictures_are_drawn")
@pytest.mark.parametrize("name", COMMANDS if FULL else [*COMMANDS][::13])
def test_a_command_that_is_stopped_ends_in_a_line_and_works_again(name, ground, command, tmp_path):
    words, whole = COMMANDS[name], tmp_path / "whole"
    shutil.copytree(ground, whole)
    process = Forked(stopped, str(whole), signal.SIGINT, 1000, *words)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    seconds = float((tmp_path / "whole.seconds").read_text())
    expected = compared(whole)
    draw, codes = random.Random(name), Counter[int]()
    for number in range(TIMES):
        folder = tmp_path / f"stopped-{number}"
        shutil.copytree(ground, folder)
        kind = draw.choice([signal.SIGINT, signal.SIGTERM])
        process = Forked(stopped, str(folder), kind, draw.uniform(0, seconds), *words)
        said, code = process.communicate()[0], process.returncode
        codes[code or 0] += 1
        assert code in (0, 130) and "Traceback" not in said, (code, said)
        assert (code == 130) == ("stopped" in said.splitlines()[-1] if said else False), said
        with chdir(folder):
            code, said = command(*words)
        assert code == 0 or "already" in said, said  # it came after the last file
        found = compared(folder)
        assert found == expected, {key for key in found | expected if found.get(key) != expected.get(key)}
        shutil.rmtree(folder)
    print(name, dict(codes))  # noqa: T201 - shown by -s


def compared(folder: Path) -> dict[str, Any]:
    """What files hold, but for those that no two runs of a command write alike."""
    return {name: value for name, value in contents(folder).items() if not name.startswith(RANDOM)}
