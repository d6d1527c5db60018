"""A SuperLink and its SuperNodes to do harm to: they can be killed, and their app has traps."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from simulations import loopback
from tests.deployment.processes import clear, kill_marked
from tests.deployment.sites import Traps
from tests.deployment.superlink import (
    ROOT,
    SuperLink,
    await_that,
    laid_out,
    program,
    serving,
    supernodes,
)

NODES = {"node-1": 100, "node-2": 100, "node-3": 87}
"""Users of each."""


@dataclass(frozen=True)
class Harm:
    """A harm at a node in one round; see `harmful`."""

    traps: Traps
    place: str

    def await_done(self) -> None:
        """Wait until the node has come there."""
        await_that((self.traps.folder / f"{self.place}.reached").exists)

    def end(self) -> None:
        """Let the node go on."""
        self.traps.free(self.place)


@dataclass(frozen=True)
class FaultySite:
    """A SuperLink that keeps its runs in a database, and starts no ServerApp by itself."""

    link: SuperLink
    app: Path  # what is submitted to it
    stack: ExitStack  # ends all processes

    def arm(self, node: str, harm: str, number: int) -> Harm:
        """Let a node do a harm when it has the offer of a round."""
        armed = Harm(Traps(self.link.folder / "traps" / node), f"{harm} in round {number}")
        armed.traps.arm(armed.place)
        return armed

    def run(self, experiment: str, out: Path, *, resume: bool = False) -> str:
        """Submit the app; the id of the run."""
        return self.link.run(self.app, experiment=experiment, out=str(out), resume=resume)

    def kill(self, what: str) -> None:
        """`kill -9` for the one process with these words in its command line."""
        assert kill_marked(self.link.mark, what) == 1

    def start_superlink(self) -> None:
        secret = f"--superexec-auth-secret-file={_secret(self.link)}"
        self.stack.enter_context(serving(self.link, "--isolation=process", secret))


@contextmanager
def faulty_site(folder: Path) -> Iterator[FaultySite]:
    """Such a site in an empty folder, with all nodes registered."""
    loopback.lay_out_digits(folder, tuple(NODES.values()))
    link = laid_out(folder)
    _secret(link).write_bytes(os.urandom(32))
    traps = {name: f'traps="{folder / "traps" / name}"' for name in NODES}
    with ExitStack() as stack:
        site = FaultySite(link, _harmful_app(folder / "app"), stack)
        site.start_superlink()
        stack.enter_context(_superexec(link))
        stack.enter_context(supernodes(link, traps))
        try:
            yield site
        finally:
            clear(link.mark)  # asked one after the other, they would take their time


def _secret(link: SuperLink) -> Path:
    return link.folder / "superexec.secret"


@contextmanager
def _superexec(link: SuperLink) -> Iterator[None]:
    """What starts the ServerApp of a run."""
    arguments = (
        "flower-superexec",
        f"--root-certificates={link.ca}",
        f"--runtime-api-address=127.0.0.1:{link.port}",
        f"--superexec-auth-secret-file={_secret(link)}",
    )
    with program(link, "superexec", arguments):
        yield


def _harmful_app(folder: Path) -> Path:
    """The bundle, with `harmful` before the node's app."""
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "LICENSE", folder)
    shutil.copy(Path(__file__).with_name("harmful.py"), folder / "harmful.py")
    said = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for ours, harmful in (
        ('clientapp = "fedpriv.clients.flower_app:app"', 'clientapp = "harmful:app"'),
        ("fab-include = [", 'fab-include = ["harmful.py", '),
    ):
        assert said.count(ours) == 1
        said = said.replace(ours, harmful)
    (folder / "pyproject.toml").write_text(said, encoding="utf-8")
    return folder
