"""Lazy import of geoopt: flat space, the sphere and `dmlkit check` do not wait 0.7 s for its import."""

import warnings
from typing import Any


def load_geoopt() -> Any:
    """Import geoopt without torch's warning that geoopt 0.5.1 scripts functions."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.jit")
        import geoopt

    return geoopt
