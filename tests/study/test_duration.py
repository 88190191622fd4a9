"""Durations as options take them."""

import pytest

from dmlkit.errors import UserError
from dmlkit.study.duration import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("2h", 7200), ("1h30m", 5400), ("1h1m1s", 3661), ("45s", 45), ("0h5m", 300)]
)
def test_durations(text: str, seconds: int):
    assert parse_duration(text, "--budget") == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "0h", "0h0m", "-2h", "2", "two hours", "1.5h", "2 h", "m", "30m1h", "٣h", "1h\n"]
)
def test_what_is_no_duration_is_one_line(text: str):
    with pytest.raises(
        UserError, match=r"^--budget .*expected hours, minutes and seconds, above 0, e\.g\. 90m"
    ) as told:
        parse_duration(text, "--budget")
    assert "\n" not in str(told.value)
