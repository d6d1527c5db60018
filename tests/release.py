"""What comes beside the archives of a release: hashes of all that is pinned, and an SBOM.

    python -m tests.release dist

`constraints-hashed.txt` names archives for the Python and the system that this runs on.
`sbom.json` (CycloneDX 1.6) lists what the wheel needs without extras.
"""

import json
import platform
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

Packages = dict[str, dict[str, Any]]
REPORT = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-")


def resolved(wheel: Path) -> Packages:
    """Find the wheel and what pip would install for each constraint, by name."""
    command = [sys.executable, "-m", "pip", "install", *REPORT, "-r", "constraints.txt", str(wheel)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return {canonicalize_name(p["metadata"]["name"]): p for p in json.loads(done.stdout)["install"]}


def sha256(package: dict[str, Any]) -> str:
    return str(package["download_info"]["archive_info"]["hashes"]["sha256"])


def hashed(packages: Packages) -> str:
    lines = [
        f"{name}=={package['metadata']['version']} --hash=sha256:{sha256(package)}"
        for name, package in sorted(packages.items())
    ]
    where = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    use = "pip install --require-hashes --constraint constraints-hashed.txt --find-links . fedpriv"
    return "\n".join([f"# Archives for {where}: {use}", *lines, ""])


def graph(packages: Packages, root: str) -> dict[str, set[str]]:
    """What each package requires of those that the root needs, directly or not."""
    edges: dict[str, set[str]] = {}
    waiting, seen = {(root, "")}, set()
    while waiting:
        name, extra = asked = waiting.pop()
        seen.add(asked)
        edges.setdefault(name, set())
        for line in packages[name]["metadata"].get("requires_dist", []):
            required = Requirement(line)
            if required.marker is None or required.marker.evaluate({"extra": extra}):
                needed = canonicalize_name(required.name)
                edges[name].add(needed)
                waiting |= {(needed, each) for each in ("", *required.extras)} - seen
    return edges


def licenses(metadata: dict[str, Any]) -> list[dict[str, Any]]:
    if expression := metadata.get("license_expression"):
        return [{"expression": expression}]
    classified = [c for c in metadata.get("classifier", []) if c.startswith("License ::")]
    names = [c.rpartition(" :: ")[2] for c in classified] or [metadata.get("license", "")]
    return [{"license": {"name": name}} for name in names if name and "\n" not in name]


def component(name: str, package: dict[str, Any]) -> dict[str, Any]:
    version = package["metadata"]["version"]
    purl = f"pkg:pypi/{name}@{quote(version, safe='')}"
    hashes = [{"alg": "SHA-256", "content": sha256(package)}]
    named = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return {**named, "hashes": hashes, "licenses": licenses(package["metadata"])}


def sbom(packages: Packages, root: str) -> dict[str, Any]:
    edges = graph(packages, root)
    parts = {name: component(name, packages[name]) for name in sorted(edges)}
    refs = {name: part["bom-ref"] for name, part in parts.items()}
    links = [{"ref": refs[n], "dependsOn": [refs[m] for m in sorted(edges[n])]} for n in parts]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {"timestamp": now, "component": parts.pop(root)},
        "components": list(parts.values()),
        "dependencies": links,
    }


def main(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    packages = resolved(wheel)
    (folder / "constraints-hashed.txt").write_text(hashed(packages), encoding="utf-8")
    bill = json.dumps(sbom(packages, "fedpriv"), indent=2, ensure_ascii=False)
    (folder / "sbom.json").write_text(f"{bill}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
