"""`fedpriv simulate --engine flower`: Flower's simulation on Ray, started and ended with the call.

Flower and Ray send telemetry. Flower reads the environment variables that switch it off at its
import, so the functions of this module import Flower after they have set them.
"""

import logging
import math
import os
import secrets
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpriv.errors import InvalidValueError, WorkerError
from fedpriv.support.importing import check_installed

if TYPE_CHECKING:
    from flwr.app import ConfigRecordValues, Context
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

    from fedpriv.run.run import Follow, Run

_CONNECT_SECONDS = 10.0
_NO_TELEMETRY = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; avoids a warning
}


def switch_off_telemetry() -> None:
    """Switch off telemetry in this process and its children; call it before Flower is imported."""
    os.environ.update(_NO_TELEMETRY)


def lock_ray() -> None:
    """Require a token in all calls to a Ray cluster that this process starts.

    The cluster's ports are open on all interfaces, so without a token any caller could run code.
    InvalidValueError: this process already uses Ray, which would be shut down at the end; or it
    imported Ray before this call, when it is too late to require a token.
    """
    if os.environ.get("RAY_ADDRESS") in ("", "local"):  # with these, Ray starts a cluster too
        del os.environ["RAY_ADDRESS"]
    ray, starts = sys.modules.get("ray"), "RAY_ADDRESS" not in os.environ
    unprotected = ray is not None and starts and os.environ.get("RAY_AUTH_MODE") != "token"
    if unprotected or (ray is not None and ray.is_initialized()):
        raise InvalidValueError("Ray is in use in this process already; simulate in another")
    if starts:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # read once per process


def simulate_on_ray(
    file: Path,
    assignments: list[str],
    out: Path | None,
    workers: int,
    follow: "Follow | None" = None,
    **options: Any,
) -> "Run":
    """Run a simulation like `fedpriv.run.simulate.run_simulation`, on workers of Ray.

    The input is checked before Ray is started. Afterwards, no process and no file remains, except
    those of the run. InvalidValueError: the input is wrong, or Flower or Ray is not installed.
    WorkerError: a worker failed.
    """
    check_installed("flower", "flwr", "ray")
    switch_off_telemetry()
    lock_ray()  # before users are loaded, because their loader may import Ray
    import torch
    from flwr.serverapp import ServerApp

    from fedpriv.experiment.config import load_config
    from fedpriv.flower.grid import GridSimulation, app
    from fedpriv.report.tables import screen
    from fedpriv.run.run import RunSetup

    setup = RunSetup.at(load_config(file, assignments), out, **options)
    simulation = GridSimulation.of(setup, workers)
    server_app, stopping, runs = ServerApp(), threading.Event(), list["Run"]()

    @server_app.main()
    def main(grid: "Grid", _context: "Context") -> None:
        runs.append(simulation.run(grid, stopping, screen(), follow))

    gpus = torch.cuda.device_count() if simulation.experiment.device.type == "cuda" else 0
    try:
        run_on_ray(server_app, app, workers, workers, gpus)
    finally:
        stopping.set()
    return runs[0]


def run_on_ray(
    server_app: "ServerApp", client_app: "ClientApp", nodes: int, processes: int, gpus: int = 0
) -> None:
    """Run an app in Flower's simulation, on a Ray cluster that is started for it and ends with it.

    If the environment variable RAY_ADDRESS is set, the app runs on that cluster instead, which
    keeps running. `processes` processes run the nodes, each on one core, and share the GPUs.
    Workers import the client app by its name. InvalidValueError: as for `lock_ray`, or no cluster
    answers. WorkerError: Ray does not start, or fails. Errors of the ServerApp pass unchanged.
    """
    lock_ray()
    from flwr.simulation import run_simulation

    ray_options: dict[str, ConfigRecordValues] = {"log_to_driver": False}
    share = gpu_share(gpus, processes)
    resources: dict[str, ConfigRecordValues] = {"num_cpus": 1, "num_gpus": share}
    # Flower logs errors of workers at length, perhaps with users' data; ours state the cause.
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    # A short folder, because paths of sockets must be short.
    parent = os.environ.get("RAY_TMPDIR", "/tmp")
    with tempfile.TemporaryDirectory("", "fedpriv-", parent, ignore_cleanup_errors=True) as folder:
        os.environ["FLWR_HOME"] = folder  # Flower writes an id there, even without telemetry
        if "RAY_ADDRESS" in os.environ:
            _check_cluster(os.environ["RAY_ADDRESS"])
        else:
            ray_options |= {"num_cpus": processes, "_temp_dir": folder}
        backend = {"init_args": ray_options, "client_resources": resources}
        try:
            run_simulation(server_app, client_app, nodes, backend_config=backend)
        except RuntimeError as error:  # from Flower, if Ray does not start or fails
            cause: BaseException = error
            while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
                cause = cause.__cause__
            sentence = " ".join(str(cause).split())
            raise WorkerError(f"Ray cannot run the workers: {sentence}") from error


def gpu_share(gpus: int, workers: int) -> float:
    """Return each worker's share of a GPU, so that all workers run at once.

    Ray places a worker on one GPU. For instance, with shares of 2/3 on two GPUs, the third of three
    workers would wait forever.

    >>> [gpu_share(gpus, 3) for gpus in (0, 2, 3, 4)]
    [0.0, 0.5, 1.0, 1.0]
    """
    return 1.0 / math.ceil(workers / gpus) if gpus else 0.0


def _check_cluster(address: str) -> None:
    """Raise InvalidValueError if a HOST:PORT does not answer; Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        return  # another form of addresses of Ray
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        sentence = f"RAY_ADDRESS is {address!r}, where no cluster of Ray answers"
        raise InvalidValueError(f"{sentence}: {error}") from error
