"""Durations: how long a study takes in words, and how long it may take as people write it."""

import re

from dmlkit.errors import UserError

WRITTEN = re.compile(r"(?=.)(?:([0-9]{1,5})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,6})s)?")


def spoken_time(seconds: float) -> str:
    """A duration as people say it.

    Example:
        >>> spoken_time(41.2), spoken_time(750), spoken_time(12000)
        ('41 s', '12 min 30 s', '3 h 20 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def seconds_of(text: str, option: str) -> int:
    """A duration in hours, minutes and seconds, as an option takes it.

    Raises:
        UserError: it is no duration, or none at all.

    Example:
        >>> seconds_of("1h30m", "--budget"), seconds_of("90m", "--budget"), seconds_of("45s", "--budget")
        (5400, 5400, 45)
    """
    found = WRITTEN.fullmatch(text)
    hours, minutes, seconds = (int(number or 0) for number in found.groups()) if found else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise UserError(f"{option} {text!r}: expected hours, minutes and seconds, above 0, e.g. 90m, 2h or 1h30m")
    return total
