"""Processes that run dmlkit, forked from one that has imported it: a new interpreter takes 5 s before it begins.

What a test waits for it waits for itself, with `wait_until`, and not for a time: a machine may be slow.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import count
from multiprocessing import forkserver, get_context
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from tempfile import NamedTemporaryFile
from typing import Any

from dmlkit.distributed.stopping import StopRequest
from tests.conftest import END, ROOT

WARM = get_context("forkserver")
WARM.set_forkserver_preload(
    [
        *("dmlkit.cli.app", "dmlkit.cli.progress", "dmlkit.study.runs.run_study", "dmlkit.training.train"),
        *("lance_namespace", "pandas", "pyarrow.dataset"),  # not lancedb, whose threads end in a forked process
        *("matplotlib.backends.backend_agg", "matplotlib.figure", "torchvision.models", "torchvision.transforms.v2"),
        "tests.processes",  # with pytest and Hypothesis, 0.2 s for each process otherwise
    ]
)
KILLED = 137


class Forked:
    """A process that runs a function, with the methods of `subprocess.Popen`.

    Args:
        function: what it runs; it must have a name in its module.
        arguments: of the function.
        environment: variables beside those of this process.
    """

    def __init__(
        self, function: Callable[..., object], *arguments: object, environment: Mapping[str, str] | None = None
    ) -> None:
        with contextlib.chdir(ROOT):  # where it finds this dmlkit, and no other
            forkserver.ensure_running()
        self._output = NamedTemporaryFile("r", errors="replace")  # noqa: SIM115 - as long as this object
        variables = {**os.environ, **(environment or {})}
        self._process = WARM.Process(target=_run, args=(self._output.name, variables, function, arguments))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(str(self._process), timeout, self._output.read())
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()

    def printed(self) -> str:
        """What it has printed so far."""
        return Path(self._output.name).read_text(errors="replace")

    def communicate(self, timeout: float = END) -> tuple[str, None]:
        self.wait(timeout)
        return self._output.read(), None


def _run(
    output: str, variables: dict[str, str], function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    """In the new process: all that it prints goes to a file, also what libraries print."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.clear()
    os.environ.update(variables)
    function(*arguments)


def command_line(*words: str) -> None:
    """``dmlkit`` with these words."""
    from dmlkit.cli.app import main

    sys.argv = ["dmlkit", *words]
    main()


def run_code(folder: str, text: str) -> None:
    """Run Python code in a folder, as ``python -c`` does there."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    exec(compile(text, "code", "exec"), {"__name__": "__main__"})


def command_lines(folder: str, *lines: str) -> None:
    """``dmlkit`` with the words of each line, one after another in a folder; prints code, output and errors of each."""
    os.chdir(folder)
    for line in lines:
        code, out, err = 0, io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                command_line(*line.split())
            except SystemExit as end:
                code = end.code or 0
        sys.stdout.write(f"{json.dumps([code, out.getvalue(), err.getvalue()])}\n")
        sys.stdout.flush()


def at_step(step: int, act: Callable[[StopRequest], object]) -> None:
    """From here on this process does something at the ``step``-th step of its trainings; an epoch's end counts too."""
    steps, is_known = count(1), StopRequest.is_known  # asked at each

    def asked(self: StopRequest, ranks: Any) -> bool:
        if next(steps) == step:
            act(self)
        return is_known(self, ranks)

    StopRequest.is_known = asked


def hold_at_step(step: int, marks: str) -> None:
    """From here on this process waits at a step for what stops or ends it; a file of its number in ``marks`` tells."""

    def hold(request: StopRequest) -> None:
        (Path(marks) / str(os.getpid())).touch()
        while not request.came:
            time.sleep(0.005)

    at_step(step, hold)


def held_command_line(step: int, marks: str, *words: str) -> None:
    """``dmlkit``, which waits at a step of training for what stops or ends it."""
    hold_at_step(step, marks)
    command_line(*words)


def end_before_change(last: int | None, *others: str) -> list[int]:
    """From here on this process ends before its ``last``-th change of the disk, as by kill -9.

    Args:
        others: functions of ``os`` that count as changes too.

    Returns:
        The number of its changes so far.
    """
    made, process = [0], os.getpid()

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def perform(*arguments: Any, **options: Any) -> Any:
            made[0] += os.getpid() == process  # not in those that load images
            if made[0] == last:
                os._exit(KILLED)
            return change(*arguments, **options)

        return perform

    for name in ("replace", "rename", "unlink", "rmdir", *others):
        setattr(os, name, counted(getattr(os, name)))
    return made


COPIES = """
import os, sys
exec(sys.argv[1])
for statement in sys.argv[2:]:
    if os.fork() == 0:
        exec(statement)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, statement
"""


def in_copies(first: str, *statements: str) -> list[str]:
    """The line that each statement prints in its own copy of one new process that has run ``first``.

    What imports it counts needs a process without those of tests, each of which takes 3 s for torch alone.
    """
    words = [sys.executable, "-c", COPIES, first, *statements]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0 and len(lines) == len(statements), ended.stderr
    return lines


def start(*words: object, environment: Mapping[str, str] | None = None) -> Forked:
    """A process of ``dmlkit`` with these words."""
    return Forked(command_line, *map(str, words), environment=environment)


def run_on_ranks(ranks: int, function: Callable[..., object], *arguments: object) -> list[str]:
    """Run a function on several ranks, as torchrun does; they meet at a store of this process.

    Returns:
        What each of them printed. All have ended well.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    patience = timedelta(seconds=END)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=patience)  # at a free port
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = [
        Forked(function, *arguments, environment={**meeting, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]
    wait_until(lambda: all(process.poll() == 0 for process in processes), *processes)
    return [process.communicate()[0] for process in processes]


def wait_until(is_so: Callable[[], bool], *processes: "Forked | Popen[str]") -> None:
    """Wait for what processes bring about; if they end before it, or it takes longer than `END`, all are ended."""
    deadline = time.monotonic() + END
    while not is_so():
        ended = [process.poll() for process in processes]
        is_over = any(ended) or (0 in ended and None not in ended)
        if (is_over and not is_so()) or time.monotonic() > deadline:
            for process in processes:
                process.kill()
            said = "".join(str(process.communicate(timeout=END)[0]) for process in processes)
            raise AssertionError(f"ended with {ended} before what was waited for: {said}")
        time.sleep(0.005)
