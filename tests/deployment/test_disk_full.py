"""No room where the server writes: it waits for room, and what was charged is released."""

import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from io import RawIOBase
from pathlib import Path
from typing import NoReturn

import pytest

from simulations.loopback import Program
from tests.deployment.checking import check
from tests.deployment.sites import Site, ended, refused, until

_LARGEST_FILE = 2048  # bytes: more than the server prints, less than it writes elsewhere
# Where there is no room any more: what the sentence says, and what was charged and written down.
FULL = {
    "summed": ("ledger.sqlite cannot be extended, so nothing was written", 0, 0),
    "drawn": ("ledger.participation.sqlite cannot be extended, so nothing was written", 0, 0),
    "measured": (r"round-000001.safetensors cannot be used: File too large", 1, 1),
}


def limit_files(program: Program) -> None:
    """From now on, no file of the program can grow beyond a few bytes."""
    _, most = resource.prlimit(program.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(program.process.pid, resource.RLIMIT_FSIZE, (_LARGEST_FILE, most))


@pytest.mark.slow
def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 287)
    traps = site.traps("server")
    charged = released = 0
    with site.node("node-1", "--once") as node:
        for place in sorted(FULL):
            sentence, charges, rows = FULL[place]
            traps.arm(place)
            with site.server() as server:
                traps.await_caught(place, server)
                limit_files(server)
                traps.free(place)
                assert sentence in refused(server, 1)
            charged, released = charged + charges, released + rows
            found = check(site)
            assert (found.charged, found.released, found.next_round) == (charged, released, 0)
        with site.server("--exit") as server:
            ended(server)
            ended(node)
    found = check(site)
    assert found.next_round == 6
    assert found.charged == charged + 1 + 6  # what was drawn before the last end, too


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    disk = tmp_path / "run"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def write_for_ever(file: RawIOBase, size: int) -> NoReturn:
    while True:
        file.write(bytes(size))


def fill(disk: Path) -> Path:
    """Leave no byte free; returns what fills it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            with pytest.raises(OSError, match="No space left"):
                write_for_ever(file, size)
    return filler


PLACES = ("drawn", "summed", "charged", "released", "measured")


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path: Path, small_disk: Path) -> None:
    site = Site.lay_out(tmp_path, 287)
    traps = site.traps("server")
    with site.server("--exit") as server, site.node("node-1", "--once") as node:
        for number, place in enumerate(PLACES):
            traps.arm(place)
            traps.await_caught(place, server)
            filler = fill(small_disk)
            traps.free(place)
            until(lambda most=number: server.text.count("waits for room") > most, server)
            assert "No space left" in server.text or "disk is full" in server.text
            filler.unlink()
        ended(server)
        ended(node)
    found = check(site)
    assert found.next_round == found.charged == found.released == 6


def allow_files(program: Program, soft: int) -> int:
    """How many descriptors a program may have from now on; returns how many it might have."""
    pid = program.process.pid
    before, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, most))
    return before


@pytest.mark.slow
def test_no_descriptors_where_the_run_is_written(tmp_path: Path) -> None:
    site = Site.lay_out(tmp_path, 287)
    traps = site.traps("server")
    with site.server("--exit") as server, site.node("node-1", "--once") as node:
        for number, place in enumerate(("released", "measured")):
            traps.arm(place)
            traps.await_caught(place, server)
            before = allow_files(server, 4)
            traps.free(place)
            until(lambda most=number: server.text.count("Too many open files") > most, server)
            allow_files(server, before)
        ended(server)
        ended(node)
    found = check(site)
    assert found.next_round == found.charged == found.released == 6


@pytest.mark.slow
def test_strangers_who_connect_and_say_nothing(tmp_path: Path) -> None:
    """They take all connections that a port may have, and the run goes on."""
    site = Site.lay_out(tmp_path, 287)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    few = ("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh", *site.command("server"))
    with (
        site.server("--exit", "--set=rounds=30", command=few) as server,
        site.node("node-1", "--once") as node,
        ExitStack() as stack,
    ):
        site.await_releases(1, server, node)
        for _ in range(1500):
            address = ("127.0.0.1", site.port)
            stack.enter_context(socket.create_connection(address, timeout=20.0))
        ended(server)
        ended(node)
        assert "Too many open files" not in server.text
    found = check(site)
    assert found.next_round == found.charged == found.released == 30
