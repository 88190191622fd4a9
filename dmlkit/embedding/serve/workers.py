"""Processes that answer on one socket together: they are started, started again if one ends, and stopped."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from tempfile import TemporaryDirectory
from time import monotonic
from types import FrameType
from typing import NamedTuple

from dmlkit.distributed.device_name import count_cores
from dmlkit.errors import UserError, warn

METRICS = "PROMETHEUS_MULTIPROC_DIR"
"""Variable of prometheus-client: folder in which the processes of a server keep their counts, to be summed."""
THREADS = "OMP_NUM_THREADS"
PAUSE = 10.0  # seconds from one start of a worker to the next: one that cannot start is not tried without end
PATIENCE = 40.0  # seconds for workers to finish their requests; more than the server's own limit
STOPPING = (signal.SIGINT, signal.SIGTERM)
CONTEXT = multiprocessing.get_context("spawn")  # a forked process could not use torch's threads

Work = Callable[[Connection], None]
"""What a worker does: it sends the number of images that it serves, or the message of an error, and then answers
requests until it gets SIGTERM or the other end of the connection is closed."""


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Connection
    started: float


def run_workers(work: Work, count: int, started: Callable[[int], None]) -> None:
    """Do the same work in several processes until this one gets SIGINT or SIGTERM.

    The processors are divided among them, unless ``OMP_NUM_THREADS`` is set. Interrupts are for this process alone:
    the workers ignore SIGINT, which a terminal sends to all of them.

    Args:
        work: what each worker does; a function of a module, with arguments that can be pickled.
        started: called with the number of images when all of them serve.

    Raises:
        UserError: a worker cannot start.
    """
    os.environ.setdefault(THREADS, str(max(1, count_cores() // count)))
    workers = list[_Worker]()
    with _summed_counts(), _stop_signals() as stop:
        try:
            workers += [_start(work) for _ in range(count)]
            images = [_first_message(one, stop) for one in workers]
            if stop.poll():
                return
            started(max(images))
            while not stop.poll():
                wait([stop, *(one.process.sentinel for one in workers)])
                for place, one in enumerate(workers):
                    if not one.process.is_alive() and not stop.poll():
                        workers[place] = _replacement(one, work, stop)
        finally:
            _end(workers)


def _start(work: Work) -> _Worker:
    """Start a worker, which ignores SIGINT from its first moment, as programs do that are started with it ignored."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=work, args=(theirs,), name="dmlkit worker")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    theirs.close()
    return _Worker(process, ours, monotonic())


def _first_message(worker: _Worker, stop: Connection) -> int:
    """Return the number of images of a worker that serves; 0 if it shall stop before.

    Raises:
        UserError: it cannot start.
    """
    if stop in wait([stop, worker.connection]):
        return 0
    found = _message(worker)
    if isinstance(found, int):
        return found
    raise UserError(found or f"a worker {_end_of(worker.process)} before it answered; its messages are above")


def _message(worker: _Worker) -> int | str | None:
    """Return what a worker has sent and was not read; None if there is nothing."""
    with suppress(EOFError, OSError):
        if worker.connection.poll():
            return worker.connection.recv()
    return None


def _replacement(ended: _Worker, work: Work, stop: Connection) -> _Worker:
    """Start a worker in place of one that has ended, at the earliest `PAUSE` after that was started."""
    message = _message(ended)
    reason = f": {message}" if isinstance(message, str) else ""
    warn(f"worker {ended.process.pid} {_end_of(ended.process)}{reason}; another one is started in its place")
    ended.connection.close()
    if stop.poll(max(0.0, ended.started + PAUSE - monotonic())):
        return ended
    return _start(work)


def _end_of(process: BaseProcess) -> str:
    process.join()
    code = process.exitcode or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _end(workers: list[_Worker]) -> None:
    """Let workers finish what runs, and end those that do not."""
    deadline = monotonic() + PATIENCE
    for one in workers:
        one.process.terminate()
        one.connection.close()
    for one in workers:
        one.process.join(max(0.0, deadline - monotonic()))
        if one.process.is_alive():
            one.process.kill()
            one.process.join()


@contextmanager
def _summed_counts() -> Generator[None]:
    """Let processes that are started here keep their counts in one folder."""
    before = os.environ.get(METRICS)
    with TemporaryDirectory(prefix="dmlkit-metrics-") as folder:
        os.environ[METRICS] = folder
        try:
            yield
        finally:
            del os.environ[METRICS]
            if before is not None:
                os.environ[METRICS] = before


@contextmanager
def _stop_signals() -> Generator[Connection]:
    """Yield a connection that can be read once a signal has come that stops the server."""
    stop, sender = CONTEXT.Pipe(duplex=False)

    def send(_: int, __: FrameType | None) -> None:
        sender.send_bytes(b"stop")

    before = {number: signal.signal(number, send) for number in STOPPING}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.close()
        sender.close()
