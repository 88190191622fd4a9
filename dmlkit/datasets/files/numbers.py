"""Parsing of numbers in the lists of datasets."""

MAX_DIGITS = 18  # a number with so many digits always fits into 64 bits


def whole_number(text: str) -> int | None:
    """Return the non-negative whole number that a text represents; None for any other text.

    Example:
        >>> whole_number("042"), whole_number("²"), whole_number("-1"), whole_number("9" * 19)
        (42, None, None, None)
    """
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None
