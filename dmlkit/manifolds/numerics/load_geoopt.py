"""geoopt, for who needs it: flat space, the sphere and `dmlkit check` need not wait 0.7 s for its import."""

import warnings
from typing import Any


def load_geoopt() -> Any:
    """The package; without the warning of torch that geoopt 0.5.1 scripts functions."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.jit")
        import geoopt

    return geoopt
