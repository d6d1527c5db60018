"""What a Python program asks the kernel to write and to sync, in order, as seen from outside it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# Each call is logged as strace -y does, when it returns.
_SHIM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static long logged(const char *name, int file, long result) {
    char link[32], path[4096], line[4200];
    int error = errno, log = open(getenv("DISK_CALLS"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path);
    int length = snprintf(line, sizeof line, "%s(%d<%.*s>) = %ld\n",
                          name, file, size < 0 ? 0 : (int)size, path, result);
    if (syscall(SYS_write, log, line, length) != length) abort();
    close(log);
    errno = error;
    return result;
}

int fsync(int file) { return logged("fsync", file, syscall(SYS_fsync, file)); }
int fdatasync(int file) { return logged("fdatasync", file, syscall(SYS_fdatasync, file)); }
ssize_t write(int file, const void *from, size_t size) {
    return logged("write", file, syscall(SYS_write, file, from, size));
}
ssize_t pwrite64(int file, const void *from, size_t size, off64_t at) {
    return logged("pwrite64", file, syscall(SYS_pwrite64, file, from, size, at));
}
ssize_t pwrite(int file, const void *from, size_t size, off_t at) {
    return pwrite64(file, from, size, at);
}
"""
_CALL = re.compile(r"(fsync|fdatasync|write|pwrite64)\(\d+<(.*?)>.*\) += (-?\d+)")


@dataclass(frozen=True)
class DiskCall:
    """One call that succeeded."""

    path: Path  # of the file
    syncs: bool  # whether it waits until the file is on the disk; otherwise it writes


def by_strace(program: str, folder: Path) -> list[DiskCall]:
    """Run a program with the folder as its argument; its calls as the kernel saw them."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not on PATH")
    log = folder / "strace"
    if subprocess.run(["strace", "-o", log, "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace processes here")
    trace = ("strace", "-f", "-y", "-e", "trace=fsync,fdatasync,write,pwrite64", "-o", log)
    _run([*trace, sys.executable, "-c", program, folder])
    return _calls(log)


def by_preloading(program: str, folder: Path) -> list[DiskCall]:
    """The same as the C library was asked for them, by a library loaded before it."""
    compiler, shim = shutil.which("cc"), folder / "shim.so"
    if compiler is None:
        pytest.skip("cc is not on PATH")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", shim]
    if subprocess.run(command, input=_SHIM, text=True, capture_output=True, check=False).returncode:
        pytest.skip("cc does not compile Linux's system calls here")
    log = folder / "shim"
    _run([sys.executable, "-c", program, folder], LD_PRELOAD=str(shim), DISK_CALLS=str(log))
    return _calls(log)


OBSERVERS: tuple[Callable[[str, Path], list[DiskCall]], ...] = (by_strace, by_preloading)


def _run(command: list[str | Path], **environment: str) -> None:
    # Calls of several threads would interrupt each other in the log.
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(command, env={**os.environ, **one_thread, **environment}, check=True)


def _calls(log: Path) -> list[DiskCall]:
    text = log.read_text(encoding="utf-8", errors="replace")
    assert "unfinished" not in text
    found = [_CALL.search(line) for line in text.splitlines()]
    return [
        DiskCall(Path(call[2]), call[1] in {"fsync", "fdatasync"})
        for call in found
        if call and int(call[3]) >= 0
    ]
