"""`fedpriv simulate --engine flower`: Flower's simulation on Ray, begun and ended with the call."""

import logging
import math
import os
import secrets
import socket
import tempfile
import threading
from pathlib import Path

import torch
from flwr.app import ConfigRecordValues, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from rich.console import Console

from fedpriv.errors import InvalidValueError, WorkerError

from .grid_simulation import GridSimulation
from .simulation import Follow

_CONNECT_SECONDS = 10.0


def simulate_on_ray(
    client_app: ClientApp,
    file: Path,
    assignments: list[str],
    out: Path | None,
    workers: int,
    *,
    resume: bool,
    follow: Follow | None = None,
) -> None:
    """As `server.simulation.run_simulation`, with the users spread among workers of Ray.

    Ray runs as `on_ray` has it. Call `switch_off_reports` before this module is imported.

    Guarantees: the input is checked before Ray is started; no process and no file but those of the
    run is left on this machine.

    Args:
        client_app: what the workers run; they import it by its name.
        file: the experiment, TOML.
        assignments: "a.b=value" overrides.
        out: folder of the run; by default a new one under runs/.
        workers: how many.
        resume: go on with the run in `out`, or start it if there is none.
        follow: as for `carry_out`.

    Raises:
        InvalidValueError: nobody answers at RAY_ADDRESS.
        WorkerError: a worker does not do its part, e.g. because fedpriv is not installed there.
        FedprivError: something is wrong with the input; the message says what.
    """
    simulation = GridSimulation.of(file, assignments, out, workers, resume=resume)
    server_app, stopping = ServerApp(), threading.Event()

    @server_app.main()
    def main(grid: Grid, _context: Context) -> None:
        simulation.run(grid, stopping, Console(), follow)

    gpus = torch.cuda.device_count() if simulation.experiment.device.type == "cuda" else 0
    try:
        on_ray(server_app, client_app, workers, workers, gpus)
    finally:
        stopping.set()


def on_ray(
    server_app: ServerApp, client_app: ClientApp, nodes: int, processes: int, gpus: int = 0
) -> None:
    """Run an app in Flower's simulation, on Ray that is started for it and ends with it.

    Where the environment variable RAY_ADDRESS says so, its processes are on a cluster that is up
    and stays up.

    Args:
        server_app: what this process runs.
        client_app: what nodes run.
        nodes: how many there are.
        processes: in how many, each with a core, they get their turns; of a cluster, all cores.
        gpus: how many these share.

    Guarantees: nobody else can use the Ray that is started here, although its ports are open to
    all.

    Raises:
        InvalidValueError: nobody answers at RAY_ADDRESS.
        WorkerError: Ray does not start, or breaks.
        Exception: whatever the ServerApp raises.
    """
    if "RAY_ADDRESS" in os.environ:
        _check_cluster(os.environ["RAY_ADDRESS"])
    else:
        _lock_ray()
    # Its pages on what a worker raised may hold users' data; what matters is in our own sentence.
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    # Paths of sockets must be short, which those of other temporary folders need not be.
    short = os.environ.get("RAY_TMPDIR", "/tmp")
    with tempfile.TemporaryDirectory(
        prefix="fedpriv-", dir=short, ignore_cleanup_errors=True
    ) as folder:
        os.environ["FLWR_HOME"] = folder  # where it writes an id, even of those it is not to report
        try:
            backend = _backend(processes, gpus, folder)
            run_simulation(server_app, client_app, nodes, backend_config=backend)
        except RuntimeError as error:  # Flower's, when Ray does not start or breaks
            cause = " ".join(str(_cause(error)).split())
            raise WorkerError(f"Ray cannot run the workers: {cause}") from error


def _backend(processes: int, gpus: int, folder: str) -> dict[str, dict[str, ConfigRecordValues]]:
    """What Flower is to ask of Ray: one core for each process, and shares of the GPUs."""
    of_ray: dict[str, ConfigRecordValues] = {"log_to_driver": False}
    if "RAY_ADDRESS" not in os.environ:
        of_ray |= {"num_cpus": processes, "_temp_dir": folder}
    share = gpu_share(gpus, processes)
    return {"init_args": of_ray, "client_resources": {"num_cpus": 1, "num_gpus": share}}


def gpu_share(gpus: int, workers: int) -> float:
    """Share of one GPU for each worker, so that all of them are placed at once.

    A worker trains on one GPU, and Ray places it on one: shares of 2/3 on two GPUs would leave the
    third of three workers waiting for ever.

    >>> [gpu_share(gpus, 3) for gpus in (0, 2, 3, 4)]
    [0.0, 0.5, 1.0, 1.0]

    Args:
        gpus: of the machine; 0 to train on its cores.
        workers: at least one.
    """
    return 1.0 / math.ceil(workers / gpus) if gpus else 0.0


def _lock_ray() -> None:
    """Let only processes that this one starts use its Ray.

    Ray's ports are open on all interfaces, and whoever reaches them could run code here.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # a process reads it once


def _check_cluster(address: str) -> None:
    """Refuse a HOST:PORT where nobody answers; Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        return  # one of the other forms that Ray knows
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InvalidValueError(
            f"RAY_ADDRESS is {address!r}, where no cluster of Ray answers: {error}"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """What lies behind errors of Flower, which only say that there was one."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error
