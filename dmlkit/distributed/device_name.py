"""Names of devices, checked before torch is imported."""

import re

from dmlkit.errors import UserError

DEVICE = re.compile(r"(auto|cpu|mps|cuda)(?::(\d+))?")


def parse_device(device: str) -> tuple[str, int | None]:
    """Return the kind of a device, and its number if one is requested.

    Raises:
        UserError: it is not the name of a device.

    Example:
        >>> parse_device("auto"), parse_device("cuda:1")
        (('auto', None), ('cuda', 1))
    """
    match = DEVICE.fullmatch(device)
    if match is None or (match[2] and match[1] != "cuda"):
        raise UserError(f"--device {device}: expected auto, cpu, cuda, cuda:N or mps")
    return match[1], int(match[2]) if match[2] else None
