"""`fedpriv simulate --engine flower`: Flower's simulation on Ray, started and ended with the call.

Flower and Ray report on their users. Flower reads the switches when it is imported, so it is
imported after they are set, inside the functions of this module.
"""

import logging
import math
import os
import secrets
import socket
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fedpriv.errors import InvalidValueError, WorkerError

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
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray will do, and warns of until then
}


def switch_off_telemetry() -> None:
    """For this process and those that it starts; to be called before Flower is imported."""
    os.environ.update(_NO_TELEMETRY)


def lock_ray() -> None:
    """Have a Ray that this process starts take calls with a token alone.

    Its ports are open on all interfaces, and without a token any caller could run code.
    InvalidValueError: Ray is in use here already, and would be shut down in the end, or was
    imported, which is when it reads whether calls need a token.
    """
    if os.environ.get("RAY_ADDRESS") in ("", "local"):  # with which Ray starts one, too
        del os.environ["RAY_ADDRESS"]
    ray, starts = sys.modules.get("ray"), "RAY_ADDRESS" not in os.environ
    open_ray = ray is not None and starts and os.environ.get("RAY_AUTH_MODE") != "token"
    if open_ray or (ray is not None and ray.is_initialized()):
        raise InvalidValueError("Ray is in use in this process already; simulate in another")
    if starts:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # read once a process


def simulate_on_ray(
    file: Path,
    assignments: list[str],
    out: Path | None,
    workers: int,
    *,
    resume: bool,
    keep_going: bool = False,
    follow: "Follow | None" = None,
) -> "Run":
    """As `fedpriv.run.simulate.run_simulation`, with the users spread among workers of Ray.

    The input is checked before Ray is started; no process and no file except those of the run is
    left on this machine. WorkerError: a worker does not do its part.
    """
    missing = [name for name in ("flwr", "ray") if find_spec(name) is None]
    if missing:
        install = "pip install 'fedpriv[flower]' installs it"
        raise InvalidValueError(f"{' and '.join(missing)} cannot be imported; {install}")
    switch_off_telemetry()
    lock_ray()  # before users are loaded, by what may import Ray
    import torch
    from flwr.serverapp import ServerApp
    from rich.console import Console

    from fedpriv.flower.client_app import app as client_app
    from fedpriv.flower.grid import GridSimulation
    from fedpriv.run.run import RunSetup

    setup = RunSetup.of(file, assignments, out, resume=resume, keep_going=keep_going)
    simulation = GridSimulation.of(setup, workers)
    server_app, stopping, ended = ServerApp(), threading.Event(), list["Run"]()

    @server_app.main()
    def main(grid: "Grid", _context: "Context") -> None:
        ended.append(simulation.run(grid, stopping, Console(markup=False, emoji=False), follow))

    gpus = torch.cuda.device_count() if simulation.experiment.device.type == "cuda" else 0
    try:
        run_on_ray(server_app, client_app, workers, workers, gpus)
    finally:
        stopping.set()
    return ended[0]


def run_on_ray(
    server_app: "ServerApp", client_app: "ClientApp", nodes: int, processes: int, gpus: int = 0
) -> None:
    """Run an app in Flower's simulation, on a Ray that is started for it and ends with it.

    Where the environment variable RAY_ADDRESS is set, it runs on that cluster instead, which stays
    up. So many processes run the nodes, each on a core, and share the GPUs; workers import the
    client app by its name. InvalidValueError: as `lock_ray`. WorkerError: Ray does not start, or
    breaks. Whatever the ServerApp raises passes through.
    """
    lock_ray()
    from flwr.simulation import run_simulation

    of_ray: dict[str, ConfigRecordValues] = {"log_to_driver": False}
    share = gpu_share(gpus, processes)
    resources: dict[str, ConfigRecordValues] = {"num_cpus": 1, "num_gpus": share}
    # Its pages on what a worker raised may hold users' data; what matters is in our own sentence.
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    # Paths of sockets must be short, which those of other temporary folders need not be.
    short = os.environ.get("RAY_TMPDIR", "/tmp")
    with tempfile.TemporaryDirectory("", "fedpriv-", short, ignore_cleanup_errors=True) as folder:
        os.environ["FLWR_HOME"] = folder  # it writes an id there, even with telemetry off
        if "RAY_ADDRESS" in os.environ:
            _check_cluster(os.environ["RAY_ADDRESS"])
        else:
            of_ray |= {"num_cpus": processes, "_temp_dir": folder}
        backend = {"init_args": of_ray, "client_resources": resources}
        try:
            run_simulation(server_app, client_app, nodes, backend_config=backend)
        except RuntimeError as error:  # Flower's, when Ray does not start or breaks
            cause: BaseException = error
            while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
                cause = cause.__cause__
            sentence = " ".join(str(cause).split())
            raise WorkerError(f"Ray cannot run the workers: {sentence}") from error


def gpu_share(gpus: int, workers: int) -> float:
    """Share of one of the machine's GPUs for each worker, so that all are placed at once.

    Ray places a worker on one GPU: shares of 2/3 on two GPUs would leave the third of three
    workers waiting for ever.

    >>> [gpu_share(gpus, 3) for gpus in (0, 2, 3, 4)]
    [0.0, 0.5, 1.0, 1.0]
    """
    return 1.0 / math.ceil(workers / gpus) if gpus else 0.0


def _check_cluster(address: str) -> None:
    """Refuse a HOST:PORT that does not answer; Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        return  # one of the other forms that Ray knows
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        found = f"RAY_ADDRESS is {address!r}, where no cluster of Ray answers"
        raise InvalidValueError(f"{found}: {error}") from error
