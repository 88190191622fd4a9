"""The socket and the processes of a server; the processes are uvicorn's."""

import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import TypeAdapter
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from dmlkit.distributed.device_name import count_cores
from dmlkit.errors import UserError
from dmlkit.files.source import kind_of, require_folder, require_review
from dmlkit.serve.access import Access, check_token
from dmlkit.serve.app import METRICS, make_app
from dmlkit.serve.requests import is_loopback
from dmlkit.serve.service import Service
from dmlkit.vectors.fusion import ModelChoice

GRACE = 10  # seconds for requests that are running when the server is stopped
ALIVE = 30  # seconds without a sign of life after which uvicorn replaces a process; imports of torch block for 1 to 10
SERVED = TypeAdapter(tuple[Path, Access, ModelChoice])
VARIABLE = "DMLKIT_SERVED"
"""What the processes of a server serve, as JSON."""


def run_server(
    source: Path, access: Access, model: ModelChoice, *, port: int, workers: int, started: Callable[[str, int], None]
) -> None:
    """Serve a source until the process gets SIGINT or SIGTERM; requests that are running then have `GRACE` seconds.

    Args:
        port: 0 takes a free one.
        workers: number of processes, among which the processors are divided unless ``OMP_NUM_THREADS`` is set.
        started: called with the address and the number of images when the server listens.
    """
    host, token = access.host, access.token
    if not is_loopback(host) and not token:
        raise UserError(f"--host {host}: other machines could use this server; set a token in DMLKIT_TOKEN")
    check_token(token, "DMLKIT_TOKEN")
    if access.allow_writes and kind_of(source) != "gallery":
        raise UserError(f"--allow-writes: {source} is not a gallery; serve a gallery to change it")
    if workers > 1 and access.review is not None:
        raise UserError(
            f"--workers {workers}: one process divides the questions of a review among reviewers; leave out --workers "
            "or --review"
        )
    if access.root is not None:
        require_folder(access.root)
    if access.review is not None:
        require_review(access.review)
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from None
    with listening:
        with closing(Service(source, model)) as service:  # also before workers start, which reports a mistake once
            app, count = make_app(service, access), len(service.snapshot.points)
            started(f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}", count)
            if workers == 1:
                with suppress(KeyboardInterrupt):  # uvicorn raises it again, once all requests are answered
                    uvicorn.Server(_config(app)).run(sockets=[listening])
                return
        del service, app  # its memory
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // workers)))
        os.environ[VARIABLE] = SERVED.dump_json((source, access, model)).decode()
        with TemporaryDirectory(prefix="dmlkit-metrics-") as os.environ[METRICS]:
            processes = Multiprocess(_config(f"{__name__}:{app_of_process.__name__}", workers), [listening])
            processes.run()
        if any(process.exitcode == STARTUP_FAILURE for process in processes.processes):
            raise UserError("a process cannot start; its message is above")


def app_of_process() -> FastAPI:
    """Return the application of one of several processes; a mistake ends all of them."""
    try:
        source, access, model = SERVED.validate_json(os.environ[VARIABLE])
        return make_app(Service(source, model), access)
    except (UserError, OSError, MemoryError) as error:
        logging.getLogger("uvicorn.error").error(str(error) or type(error).__name__)
        sys.exit(STARTUP_FAILURE)


def _config(app: Any, processes: int = 1) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",  # which bounds the headers of a request
        log_level="warning",
        access_log=False,
        lifespan="off",  # at a second Ctrl-C uvicorn would print the traceback of its task
        timeout_graceful_shutdown=GRACE,
        timeout_worker_healthcheck=ALIVE,
        server_header=False,
        factory=processes > 1,
        workers=processes,
    )
