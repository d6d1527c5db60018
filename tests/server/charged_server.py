"""A server in a process of its own that runs a charged round whenever it is told to."""

import ctypes
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import numpy as np

from fedpriv.ledger.events import PrivacyBudget
from fedpriv.ledger.ledger import Ledger
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.server import gateway
from fedpriv.server.enrolment import Enrolment
from fedpriv.server.service import TransferLimits
from fedpriv.support.logs import LogFormat, configure
from fedpriv.training.rounds import initial_state, train
from tests.server.loopback import PATIENCE, POPULATION_ID, RemoteSite, site
from tests.training.federation import LAYOUT, PARAMETERS, make_plan, rounds_spent

Users = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class ChargedServer:
    """What a test holds of the server."""

    site: RemoteSite
    folder: Path
    process: BaseProcess
    pipe: Connection

    def begin_round(self) -> None:
        """Draw everybody, and ask for their answers."""
        self.pipe.send(True)

    def released_sum(self) -> np.ndarray:
        """[D] what the round released, without noise, times the expected size of a cohort."""
        return self.pipe.recv()

    def charges(self) -> int:
        """How many releases the ledger holds, once the server has ended."""
        with Ledger.open(self.folder / "ledger.sqlite") as ledger:
            ledger.verify()
            return ledger.head.count

    @property
    def log(self) -> str:
        """What the server and gRPC have written."""
        return (self.folder / "log.txt").read_text(errors="backslashreplace")

    @property
    def resident_bytes(self) -> int:
        """Memory of the process that is in use."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    @property
    def descriptors(self) -> int:
        """How many files and connections the process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208

    def stop(self) -> int | None:
        """End the server; its exit status."""
        if self.process.is_alive():
            self.pipe.send(False)
        self.process.join(60.0)
        return self.process.exitcode


@contextmanager
def charged_server(
    folder: Path, users: Users, rates: Mapping[str, float] | None = None
) -> Iterator[ChargedServer]:
    """A server that listens within the block, with these rates of `Allowance`."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(folder, users, theirs, rates or {}))
    # As `configure` does where gRPC was not imported before; here it was, with this module.
    with patch.dict(os.environ, {"GRPC_VERBOSITY": "NONE"}):
        process.start()
    theirs.close()
    try:
        remote = RemoteSite(folder / "certs", Enrolment(POPULATION_ID, users), ours.recv())
        server = ChargedServer(remote, folder, process, ours)
        yield server
        server.stop()
    finally:
        process.kill()
        process.join()
        ours.close()


def _serve(folder: Path, users: Users, pipe: Connection, rates: Mapping[str, float]) -> None:
    errors = (folder / "log.txt").open("w")
    os.dup2(errors.fileno(), 2)
    configure(LogFormat.TEXT)
    patience = PATIENCE.model_copy(update={"deadline_seconds": 120.0, "absent_seconds": 0.0})
    with ExitStack() as changed, site(folder, users, TransferLimits(2, 20.0)) as made:
        for name, rate in rates.items():
            changed.enter_context(patch.object(gateway, name, rate))
        enrolment = made.enrolment
        sampling = PoissonSampling(enrolment.population, 1.0)
        plan = make_plan(
            rounds=10_000, population=POPULATION_ID, sampling=sampling, noise_multiplier=0.0
        )
        state = initial_state(plan, PARAMETERS)
        ledger, record = folder / "ledger.sqlite", folder / "participation.sqlite"
        budget = PrivacyBudget(1e9, 1e-5, rounds_spent)
        with PrivacyRecords.open(ledger, record, POPULATION_ID, budget) as books:
            pipe.send(made.server.address.port)
            while pipe.recv():
                transport = made.transport(patience)
                after, _ = next(train(plan, state, transport, books, OperatingSystemEntropy()))
                step = flat_of(after.parameters) - flat_of(state.parameters)
                state = after
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps for later is no growth
                pipe.send(step * sampling.expected_cohort_size)


def flat_of(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """[D] float64 of tensors in the order of the layout."""
    return np.concatenate([tensors[name].ravel() for name in LAYOUT.names]).astype(np.float64)
