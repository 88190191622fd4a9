"""What claiming a device does to the process."""

import re
import resource
import sys
from pathlib import Path
from socket import socket

import pytest
import torch

from dmlkit.datasets.glyphs import GlyphsConfig
from dmlkit.distributed import launch
from dmlkit.distributed.launch import start_ranks
from dmlkit.loading.batches import evaluation_loader
from tests.conftest import refuses
from tests.processes import Forked


def print_faults() -> None:
    """Page faults of a large tensor, before and after the setting; in a process whose memory nobody kept."""
    torch.set_num_threads(1)
    print(least_faults())  # noqa: T201
    launch.keep_freed_memory()
    print(least_faults())  # noqa: T201


def least_faults() -> int:
    """Of many times: small blocks may split the first few that are kept."""
    faults: list[int] = []
    for _ in range(30):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16, 2**20)  # 64 MB
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults)


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_memory_that_was_freed_is_used_again_without_page_faults():
    given_back, kept = map(int, Forked(print_faults).communicate()[0].split())
    assert kept < 10 < given_back


def print_memory() -> None:
    """Resident bytes after a large tensor was freed, and after a loader's reader process was started."""
    launch.keep_freed_memory()
    torch.ones(64, 2**20)  # 256 MB
    print(resident())  # noqa: T201
    list(evaluation_loader(GlyphsConfig(classes=4, images_per_class=6).build("test"), None, workers=1))
    print(resident())  # noqa: T201


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_a_reader_process_does_not_share_memory_that_was_freed():
    kept, released = map(int, Forked(print_memory).communicate()[0].split())
    assert kept - released > 0.9 * 2**28


def test_half_precision_of_16_bits_needs_a_gpu():
    refuses("fp16 needs a GPU", start_ranks, "cpu", "fp16")


COMPLETE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc: expected a whole number of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: expected"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: expected"),
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, "WORLD_SIZE=3 is not a multiple of LOCAL_WORLD_SIZE=2"),
        ({"RANK": "2"}, "RANK=2: expected at most 1 with 2 ranks"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x: expected"),
        *(({name: ""}, f"{name} is not set; start ranks with torchrun") for name in COMPLETE if name != "WORLD_SIZE"),
    ],
)
def test_half_of_torchruns_variables_are_told_at_once_t15_t16(monkeypatch: pytest.MonkeyPatch, change, message):
    for name, value in (COMPLETE | change).items():
        monkeypatch.setenv(name, value)
    refuses(re.escape(message), start_ranks, "cpu")


def test_a_job_of_slurm_with_several_tasks_is_one_process_t15(monkeypatch: pytest.MonkeyPatch):
    job = {"NTASKS": "4", "JOB_NAME": "x", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NODELIST": "localhost"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert start_ranks("cpu").world_size == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_wait_for_ranks_is_told_and_ends_t16(rank: str, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(launch, "WARN_AFTER", 0.0)
    monkeypatch.setattr(launch, "PATIENCE", 1)
    with socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
    for name, value in (COMPLETE | alone).items():
        monkeypatch.setenv(name, value)
    where = f"WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT={port}"
    message = f"not all of 2 ranks have joined within 1 seconds ({where}); start all ranks"
    refuses(re.escape(message), start_ranks, "cpu")
    assert f"waiting for the other ranks, for at most 1 seconds: {where}" in caplog.text
