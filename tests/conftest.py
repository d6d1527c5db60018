"""Settings of the whole suite."""

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import settings

# In processes side by side, threads of products of small matrices only wait for each other. Those
# that there are, in processes that tests start too, sleep while they wait: left alone, OpenMP lets
# them spin on a core that another process needs. It reads this when torch is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# In the forked processes of other tests gRPC would begin threads, and abort for want of its files.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Ray gives way to other processes, and beside other tests its workers would hardly get any time.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling

# Every charge waits for the disk, and tests make thousands; files in memory keep nobody waiting.
with suppress(OSError):
    if "TMPDIR" not in os.environ and shutil.disk_usage("/dev/shm").free > 2**32:
        os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"

# Test models are tiny: threads only wait for each other, and for other tests.
torch.set_num_threads(1)

# How long an example takes says more about the machine than about the code. And the same examples
# are tried each time, so that what fails is what was changed; `make test-search` tries others.
settings.register_profile("same", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("search", deadline=None, derandomize=False, max_examples=1_000)
settings.load_profile("same")


# Models that files, fixtures and tests make must not depend on what the process made before them.
def pytest_collectstart() -> None:
    torch.default_generator.manual_seed(0)


def pytest_fixture_setup() -> None:
    torch.default_generator.manual_seed(0)


def pytest_runtest_call() -> None:
    torch.default_generator.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest: else one of them runs on alone when all others have ended."""
    items.sort(key=lambda item: "deployment" not in item.path.parts)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported and collected, which lives until the end."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """What a test configures of logging ends with the test."""
    loggers = [logging.getLogger(name) for name in (None, "flwr", "fedpriv")]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    root, handlers = loggers[0], list(loggers[0].handlers)
    yield
    for logger, level, propagates in before:  # else what they say reaches no later test
        logger.setLevel(level)
        logger.propagate = propagates
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    logging.captureWarnings(capture=False)
