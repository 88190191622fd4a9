"""``dmlkit serve``."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from dmlkit.cli.console import counted, say
from dmlkit.cli.option_groups import FusedModelOptions
from dmlkit.cli.options import command
from dmlkit.errors import UserError
from dmlkit.files.source import require_source
from dmlkit.serve.access import Access


@command(
    "dmlkit serve galleries/birds",
    "dmlkit serve galleries/birds --allow-writes --port 9000",
    "dmlkit serve galleries/birds --review reviews/june --allow-writes",
    "dmlkit serve galleries/birds --workers 4",
    "DMLKIT_TOKEN=secret dmlkit serve runs/birds --host 0.0.0.0",
)
def serve(
    source: Annotated[Path, "SOURCE", "Gallery, run, timm:NAME or embeddings folder.", require_source],
    /,
    port: Annotated[int, "PORT", "Port; 0 takes a free one.", {"min": 0, "max": 65535}] = 8765,
    *,
    access: Access,
    workers: Annotated[
        int, "COUNT", "Number of processes that answer; each has the model and the points in memory.", {"min": 1}
    ] = 1,
    chosen: FusedModelOptions,
) -> None:
    """Answer embed, search, identify and verify over HTTP, with a page for people.

    The page is at /, the documentation of the interface at /docs. It stops on
    Ctrl-C, after the requests that are running.
    """
    try:
        from dmlkit.serve.server import run_server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("dmlkit"):
            raise
        raise UserError(f"this needs {error.name}; install it with: pip install 'dmlkit[serve]'") from None

    access = replace(access, token=os.environ.get("DMLKIT_TOKEN") or None)

    def started(address: str, count: int) -> None:
        by = f" by {workers} processes" if workers > 1 else ""
        say(f"{source}: {counted(count, 'image')}, served on {address}{by} until Ctrl-C; the interface: {address}/docs")

    run_server(source, access, chosen.choose(source), port=port, workers=workers, started=started)
