"""A SuperLink with TLS and its SuperNodes with keys of their own, as processes on loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.deployment.processes import marked

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
SUPERLINK, SERVERAPP = "flower-superlink", "flwr-serverapp"
"""What is in their command lines."""
_LONGEST_SECONDS = 480.0


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink that runs."""

    folder: Path  # from `simulations.loopback.lay_out`; keeps what Flower writes, too
    port: int  # of all its services

    @property
    def environment(self) -> dict[str, str]:
        """Nobody outside is called, and the executables are those beside this Python."""
        return os.environ | {
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            "MARK": self.mark,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        }

    @property
    def mark(self) -> str:
        """In the environment of all its processes."""
        return str(self.folder)

    @property
    def ca(self) -> Path:
        """Who signed its certificate."""
        return self.folder / "certs" / "authority" / "ca.pem"

    def flwr(self, *arguments: str) -> str:
        """What a command of Flower's prints."""
        done = subprocess.run(
            [SCRIPTS / "flwr", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGEST_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, app: Path = ROOT, **config: object) -> str:
        """Submit an app with a run config; the id of the run."""
        file = self.folder / "run.toml"  # as an argument it could not hold an experiment
        file.write_text(tomli_w.dumps(config), encoding="utf-8")
        given = ("--run-config", str(file), "--format", "json")
        said = json.loads(self.flwr("run", str(app), "test", *given))
        assert said["success"], said
        return str(said["run-id"])

    def log_of(self, name: str) -> str:
        """What a process of this name has printed."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    @property
    def logs(self) -> str:
        """What all processes have printed."""
        return "\n".join(f"{p.stem}:\n{self.log_of(p.stem)}" for p in self.folder.glob("*.log"))

    def await_completed(self, run: str) -> None:
        """Wait until a run is completed, as Flower says."""
        await_that(lambda: self.is_running(SERVERAPP))
        await_that(lambda: not self.is_running(SERVERAPP))
        said = json.loads(self.flwr("ls", "test", "--run-id", run, "--format", "json"))
        assert said["runs"][0]["status"] == "finished:completed", self.logs

    def is_running(self, what: str) -> bool:
        """Whether it has a process with these words in the command line."""
        return any(what in line for line in marked(self.mark).values())


def await_that(condition: Callable[[], object]) -> None:
    """Wait for a condition; one that does not come fails the test."""
    end = time.monotonic() + _LONGEST_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.5)


@contextmanager
def superlink(folder: Path, *arguments: str) -> Iterator[SuperLink]:
    """A SuperLink with the certificate of a folder that is laid out, until the block is left."""
    link = laid_out(folder)
    with serving(link, *arguments):
        yield link


def laid_out(folder: Path) -> SuperLink:
    """A SuperLink that is not started yet, and what Flower's commands must know of it."""
    link = SuperLink(folder, free_port())
    home = folder / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "test"\n[superlink.test]\naddress = "127.0.0.1:{link.port}"\n'
        f'root-certificates = "{link.ca}"\n',
        encoding="utf-8",
    )
    return link


@contextmanager
def serving(link: SuperLink, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a SuperLink, once it listens; it goes on with the database of an older."""
    certificate = link.folder / "certs" / "server"
    command = (
        "flower-superlink",
        f"--ssl-ca-certfile={link.ca}",
        f"--ssl-certfile={certificate / 'server.pem'}",
        f"--ssl-keyfile={certificate / 'server.key'}",
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        "--host=127.0.0.1",
        f"--port={link.port}",
        f"--database={link.folder / 'superlink.db'}",
        f"--health-server-address=127.0.0.1:{free_port()}",
        *arguments,
    )
    with program(link, "superlink", command) as process:
        await_that(lambda: listens(link.port))
        yield process


@contextmanager
def supernodes(
    link: SuperLink, more: Mapping[str, str]
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The nodes of the folder, by name, with what their node-config holds beside their users."""
    started = {}
    with ExitStack() as stack:
        for name, settings in more.items():
            key = new_key(link.folder / "keys", name)
            link.flwr("supernode", "register", f"{key}.pub", "test")
            users = link.folder / "users" / name
            config = f'node="{name}" users="{users}" device="cpu" {settings}'
            arguments = (
                "flower-supernode",
                f"--root-certificates={link.ca}",
                f"--superlink=127.0.0.1:{link.port}",
                f"--auth-supernode-private-key={key}",
                "--host=127.0.0.1",
                f"--port={free_port()}",
                f"--health-server-address=127.0.0.1:{free_port()}",
                f"--node-config={config}",
            )
            started[name] = stack.enter_context(program(link, name, arguments))
        yield started


@contextmanager
def program(
    link: SuperLink, name: str, arguments: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process and those that it starts, ended with the block."""
    with (link.folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [SCRIPTS / arguments[0], *arguments[1:]],
            cwd=link.folder,
            env=link.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # it has been killed
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def new_key(folder: Path, name: str) -> Path:
    """A SuperNode's key, with its public half beside it."""
    folder.mkdir(exist_ok=True)
    key, path = ec.generate_private_key(ec.SECP384R1()), folder / name
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.write_bytes(private)
    path.chmod(0o600)
    path.with_name(f"{name}.pub").write_bytes(public)
    return path


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def listens(port: int) -> bool:
    """Whether a port of loopback takes connections."""
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
