"""`fedpriv simulate --engine flower`: Flower's simulation on Ray, begun and ended with the call."""

import logging
import math
import os
import tempfile
import threading
from pathlib import Path

import torch
from flwr.app import ConfigRecordValues, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from rich.console import Console

from fedpriv.errors import WorkerError

from .grid_simulation import GridSimulation


def simulate_on_ray(
    client_app: ClientApp,
    file: Path,
    assignments: list[str],
    out: Path | None,
    workers: int,
    *,
    resume: bool,
) -> None:
    """As `server.simulation.run_simulation`, with the users spread among workers of Ray.

    Ray runs on this machine until the call ends; or, where the environment variable RAY_ADDRESS
    says so, the workers are on a cluster that is up and stays up. Call `switch_off_reports` before
    this module is imported.

    Guarantees: the input is checked before Ray is started; no process and no file but those of the
    run is left on this machine.

    Args:
        client_app: what the workers run; they import it by its name.
        file: the experiment, TOML.
        assignments: "a.b=value" overrides.
        out: folder of the run; by default a new one under runs/.
        workers: how many.
        resume: go on with the run in `out`, or start it if there is none.

    Raises:
        WorkerError: a worker does not do its part, e.g. because fedpriv is not installed there.
        FedprivError: something is wrong with the input; the message says what.
    """
    simulation = GridSimulation.of(file, assignments, out, workers, resume=resume)
    server_app, stopping = ServerApp(), threading.Event()

    @server_app.main()
    def main(grid: Grid, _context: Context) -> None:
        simulation.run(grid, stopping, Console())

    logging.getLogger("flwr").setLevel(logging.ERROR)
    # Paths of sockets must be short, which those of other temporary folders need not be.
    short = os.environ.get("RAY_TMPDIR", "/tmp")
    with tempfile.TemporaryDirectory(
        prefix="fedpriv-", dir=short, ignore_cleanup_errors=True
    ) as folder:
        os.environ["FLWR_HOME"] = folder  # where it writes an id, even of those it is not to report
        try:
            run_simulation(
                server_app, client_app, workers, backend_config=_backend(simulation, folder)
            )
        except RuntimeError as error:  # Flower's, when Ray does not start or breaks
            cause = " ".join(str(error.__cause__ or error).split())
            raise WorkerError(f"Ray cannot run the workers: {cause}") from error
        finally:
            stopping.set()


def _backend(simulation: GridSimulation, folder: str) -> dict[str, dict[str, ConfigRecordValues]]:
    """What Flower is to ask of Ray: one core for each worker, and shares of the GPUs."""
    gpus = torch.cuda.device_count() if simulation.experiment.device.type == "cuda" else 0
    of_ray: dict[str, ConfigRecordValues] = {"log_to_driver": False}
    if "RAY_ADDRESS" not in os.environ:
        of_ray |= {"num_cpus": simulation.workers, "_temp_dir": folder}
    share = gpu_share(gpus, simulation.workers)
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
