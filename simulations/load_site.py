"""The site that processes of the load benchmark share, with its certificates and contributions."""

import secrets
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import tomli_w

from fedpriv.privacy.clipping import Clipping, IntegerVector
from fedpriv.privacy.layout import Layout, flat
from fedpriv.server import certificates
from fedpriv.server.certificates import tls_context
from fedpriv.training.request import LocalTraining, RoundRequest
from simulations.loopback import issue

_KINDS = 4  # different contributions, which nodes share, so that one process can hold them all
_NORM = 1.0  # far below the norm of the random updates
_LOCAL = LocalTraining(0.1, steps=1)


@dataclass(frozen=True)
class Site:
    """A federation of one-user nodes, each with a certificate, and the model that they train."""

    folder: Path  # of the certificates, as `fedpriv certs` makes it
    nodes: int  # number of nodes; node i has the user at position i
    parameters: int  # P of the model, at least 1000

    def issue(self) -> None:
        """Make all certificates, and enrol each with one user."""
        certificates.init(self.folder, ["localhost"])
        nodes = {}
        for number in range(self.nodes):
            issued = issue(self.folder, name_of(number))
            nodes[name_of(number)] = {
                "users": [user_of(number)],
                "certificate": issued.fingerprint,
            }
        enrolment = {"population": secrets.token_hex(16), "nodes": nodes}
        self.enrolment.write_text(tomli_w.dumps(enrolment), encoding="utf-8")

    @property
    def model_bytes(self) -> int:
        """Bytes of the model, and of a contribution."""
        return 4 * self.parameters

    @property
    def tls(self) -> ssl.SSLContext:
        """The certificate and trust settings of a server of the site."""
        return tls_context(self.folder / "server")

    @property
    def credentials(self) -> grpc.ServerCredentials:
        """The same for a bare server."""
        folder = self.folder / "server"
        ca, *pair = ((folder / f).read_bytes() for f in ("ca.pem", "server.key", "server.pem"))
        return grpc.ssl_server_credentials([tuple(pair)], ca, require_client_auth=True)

    def node_folder(self, number: int) -> Path:
        """Return the folder of a node's certificate and authority."""
        return self.folder / "nodes" / name_of(number)

    @property
    def enrolment(self) -> Path:
        """File of users and certificates."""
        return self.folder / "enrolment.toml"

    def cohort(self, size: int) -> list[int]:
        """Return the numbers of `size` nodes, spread over all."""
        return [i * self.nodes // size for i in range(size)]

    @property
    def kinds(self) -> int:
        """The number of different contributions; node i sends contribution i modulo this."""
        return min(_KINDS, self.nodes)

    def contribution(self, kind: int, clipping: Clipping) -> IntegerVector:
        """Return one of the contributions: int64[P]."""
        return clipping.contribution(_random(clipping.layout, 1 + kind))

    def request(self, number: int, cohort: list[int]) -> RoundRequest:
        """Return a round with this cohort, and a model that depends on the number."""
        model, users = _random(self._layout, 1000 + number), np.array(cohort, np.int64)
        return RoundRequest("load", number, 0, model, self._clipping, _LOCAL, users, bytes(32))

    def sum_of(self, cohort: list[int]) -> IntegerVector:
        """Return the sum of these nodes' contributions."""
        total = np.zeros(self.parameters, np.int64)
        for kind in range(self.kinds):
            total += sum(node % self.kinds == kind for node in cohort) * self.contribution(
                kind, self._clipping
            )
        return total

    @property
    def _clipping(self) -> Clipping:
        return Clipping(self._layout, flat(self._layout, _NORM))

    @property
    def _layout(self) -> Layout:
        columns = 1000
        rows, biases = divmod(self.parameters, columns)
        return Layout(("weight", "bias"), ((rows, columns), (biases,)))


def _random(layout: Layout, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return layout.unflatten(rng.standard_normal(layout.dimension, np.float32))


def name_of(number: int) -> str:
    """Return the name of a node."""
    return f"node-{number:06}"


def user_of(number: int) -> str:
    """Return the id of a node's user; ids sort like numbers."""
    return f"user-{number:06}"
