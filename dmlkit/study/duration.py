"""How long a study takes, in words."""


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
