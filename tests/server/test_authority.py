"""What the authority writes: keys that nobody else can read, and a list that the server follows."""

import shutil
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.server.authority import init, issue, issue_server, revoke
from fedpriv.server.certificates import CertificateError, Check, RevocationList, load_ca, node_of

# Makes every kind of key under the most generous mask, and looks at each file as it is renamed.
WATCHED = """
import os, stat, sys
from pathlib import Path

from fedpriv.server.authority import init, issue, issue_server

os.umask(0)


def watch(event, arguments):
    if event == "os.rename" and ".key" in str(arguments[0]):
        print(Path(arguments[1]).name, oct(stat.S_IMODE(os.stat(arguments[0]).st_mode)))
    if event in ("os.chmod", "os.chown") and not os.path.isdir(arguments[0]):
        print(event, arguments[0])


sys.addaudithook(watch)
certs = Path(sys.argv[1])
init(certs, ["localhost"])
issue(certs, "n")
issue(certs, "n", replace=True)
issue_server(certs, ["localhost"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init(tmp_path / "certs", ["localhost"])
    return tmp_path / "certs"


def check_at_server(folder: Path, pem: bytes) -> str:
    """The name of a node, or the check that it fails, as a server with the copy sees it."""
    ca, crl = load_ca(folder / "server" / "ca.pem"), RevocationList(folder / "server" / "crl.pem")
    try:
        return node_of(pem, ca, crl, datetime.now(UTC))
    except CertificateError as error:
        return error.check


def test_a_key_is_its_owners_from_the_first_moment(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WATCHED, str(tmp_path / "certs")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    keys = ["ca.key", "server.key", "node.key", "node.key", "server.key"]
    # The mode at the renaming is that of the making, since no file's mode was ever changed.
    assert done.stdout.splitlines() == [f"{key} 0o600" for key in keys]


def test_whoever_left_a_file_open_reads_no_key(folder: Path) -> None:
    bundle = folder / "nodes" / "n"
    bundle.mkdir(parents=True)
    partial = bundle / ".node.key.partial"
    partial.write_bytes(b"")
    partial.chmod(0o666)
    with partial.open("rb") as opened:
        issue(folder, "n")
        assert opened.read() == b""
    assert stat.S_IMODE((bundle / "node.key").stat().st_mode) == 0o600
    assert not partial.exists()


def test_the_servers_copy_of_the_list_follows_every_revocation(folder: Path) -> None:
    ours, copy = folder / "authority" / "crl.pem", folder / "server" / "crl.pem"
    assert copy.read_bytes() == ours.read_bytes()
    first = (issue(folder, "n") / "node.pem").read_bytes()
    assert check_at_server(folder, first) == "n"
    second = (issue(folder, "n", replace=True) / "node.pem").read_bytes()
    assert check_at_server(folder, first) == Check.REVOCATION
    assert check_at_server(folder, second) == "n"
    revoke(folder, "n")
    assert check_at_server(folder, second) == Check.REVOCATION
    issue_server(folder, ["localhost"])
    assert copy.read_bytes() == ours.read_bytes()


def test_without_a_servers_folder_there_is_no_copy(folder: Path) -> None:
    issue(folder, "n")
    shutil.rmtree(folder / "server")
    revoke(folder, "n")
    assert not (folder / "server").exists()
    issue_server(folder, ["localhost"])
    assert (folder / "server" / "crl.pem").read_bytes() == (
        folder / "authority" / "crl.pem"
    ).read_bytes()


def test_a_copy_that_failed_is_made_by_revoking_again(folder: Path) -> None:
    pem = (issue(folder, "n") / "node.pem").read_bytes()
    in_the_way = folder / "server" / ".crl.pem.partial"
    in_the_way.mkdir()
    with pytest.raises(InvalidValueError, match=r"crl\.pem.* cannot be written: Is a directory"):
        revoke(folder, "n")
    assert check_at_server(folder, pem) == "n"
    in_the_way.rmdir()
    revoke(folder, "n")
    assert check_at_server(folder, pem) == Check.REVOCATION
