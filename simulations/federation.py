"""A federation on loopback: one server and three nodes, with certificates.

    python -m simulations.federation [--folder DIR]

The 287 users of DIGITS are divided among three nodes, each a separate process that trains its
users. The nodes check the server's ledger before every round and after the last.
"""

import argparse
import tempfile
from pathlib import Path

from fedpriv.errors import FedprivError
from simulations import loopback

FILE = Path(__file__).with_name("federation.toml")
NODES = ("node-1", "node-2", "node-3")


def run(folder: Path) -> str:
    """Run the federation in a folder; return the server's output."""
    loopback.lay_out_digits(folder)
    with loopback.server(folder, FILE, "--exit") as server:
        port = loopback.port_of(server)
        with loopback.nodes(folder, NODES, port, "--once") as nodes:
            for program in (server, *nodes.values()):
                if program.process.wait() != 0:
                    raise FedprivError(f"{program.output} failed:\n{program.text}")
            return server.text


def main() -> None:
    """Run the federation, and print where its files are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="a new folder; by default one of its own")
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="federation-"))
    print(run(folder))
    print(f"certificates, users, logs and the run are in {folder}")


if __name__ == "__main__":
    main()
