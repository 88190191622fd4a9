"""The command line, run by torchrun: the first time its second rank is killed in the midst of the run."""

import atexit
import os
import signal

from torch import distributed
from typer import echo

from dmlkit.cli.app import main
from tests.processes import at_step

if __name__ == "__main__":
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        at_step(10, lambda _: os.kill(os.getpid(), signal.SIGKILL))  # in the second epoch
    atexit.register(lambda: echo(f"joined at its end: {distributed.is_initialized()}"))
    main()
