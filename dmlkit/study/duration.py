"""Durations as text, e.g. ``1h30m`` and ``3 h 20 min``."""

import re

from dmlkit.errors import UserError

WRITTEN = re.compile(r"(?=.)(?:([0-9]{1,5})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,6})s)?")


def format_duration(seconds: float) -> str:
    """Format a duration with its two largest units.

    Example:
        >>> format_duration(41.2), format_duration(750), format_duration(12000)
        ('41 s', '12 min 30 s', '3 h 20 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def parse_duration(text: str, option: str) -> int:
    """Parse a duration in hours, minutes and seconds and return it in seconds.

    Raises:
        UserError: the text is not a duration above 0.

    Example:
        >>> parse_duration("1h30m", "--budget"), parse_duration("90m", "--budget"), parse_duration("45s", "--budget")
        (5400, 5400, 45)
    """
    found = WRITTEN.fullmatch(text)
    hours, minutes, seconds = (int(number or 0) for number in found.groups()) if found else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise UserError(f"{option} {text!r}: expected hours, minutes and seconds, above 0, e.g. 90m, 2h or 1h30m")
    return total
