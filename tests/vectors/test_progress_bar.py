"""What a log shows of a long step, where no terminal shows a bar."""

from io import StringIO

import pytest
from rich.console import Console

from dmlkit.vectors import progress_bar


def test_without_a_terminal_a_line_is_told_every_ten_seconds(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(progress_bar, "monotonic", lambda: now[0])
    out = StringIO()
    with progress_bar.image_progress(Console(file=out, width=40), "embedding", 2000) as advance:
        for _ in range(20):
            now[0] += 4.0
            advance(100)
    assert out.getvalue().splitlines() == [
        f"embedding: {done:,} of 2,000, 25 images/s, {(2000 - done) // 25} s left" for done in range(300, 2000, 300)
    ]


def test_a_short_step_says_nothing():
    out = StringIO()
    with progress_bar.image_progress(Console(file=out), "searching", 10) as advance:
        advance(10)
    assert out.getvalue() == ""
