"""The origin of a figure: command, processor, device and versions, but not the machine's name."""

import os
import platform
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def command(module: str) -> str:
    """Return the command that started this process, a module of simulations."""
    return shlex.join(["python", "-m", f"simulations.{module}", *sys.argv[1:]])


def made_by(
    module: str, packages: Iterable[str], device: str = "cpu", threads: int = 1
) -> dict[str, object]:
    """Return the origin of figures, for their file."""
    return {
        "command": command(module),
        "machine": machine(device, threads),
        "versions": versions(packages),
    }


def machine(device: str, threads: int) -> dict[str, str | int]:
    """Return processor, number of cores, device and threads."""
    on = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "device": on,
        "threads": threads,
        "system": platform.system(),
    }


def environment(device: str = "cpu") -> dict[str, str]:
    """Return this process's environment, without settings for how libraries use the processor.

    A run on a CPU sees no GPU, because with a GPU it could train in only one process.
    """
    chosen = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
    variables = {name: value for name, value in os.environ.items() if name not in chosen}
    return variables if device == "cuda" else {**variables, "CUDA_VISIBLE_DEVICES": ""}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    numbers = {"python": platform.python_version()}
    for package in packages:
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            continue
    return numbers


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
