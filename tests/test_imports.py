"""Who may import whom, and what importing costs."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW = {  # what each package may import of the library, besides errors, support and itself
    "ledger": "",
    "accounting": "ledger",
    "privacy": "ledger",
    "secure_sums": "ledger privacy",
    "training": "ledger privacy secure_sums",
    "data": "",
    "measures": "privacy",
    "engine": "data measures privacy training",
    "analytics": "data ledger privacy",
    "audit": "accounting ledger privacy",
    "wire": "data ledger privacy secure_sums training",
    "evaluation": "analytics data engine ledger measures privacy training",
    "experiment": "accounting audit data engine evaluation ledger measures privacy training",
    "studies": "experiment",
    "report": "accounting audit ledger studies training",
    "run": (
        "accounting analytics audit data engine evaluation experiment ledger measures privacy "
        "report studies training"
    ),
}
ALLOWED = {
    f"fedpriv.{package}": {f"fedpriv.{each}" for each in allowed.split()}
    for package, allowed in BELOW.items()
}
ALLOWED["fedpriv.errors"] = set()
ALLOWED["fedpriv.support"] = {"fedpriv.errors"}
TOP = "fedpriv.__main__ fedpriv.cli fedpriv.clients fedpriv.flower fedpriv.server simulations"
ALLOWED |= {name: {"fedpriv"} for name in TOP.split()}
# The two ends of a deployment do not know each other, Flower's room stands above both, and the
# library knows none of the three.
ENDS = {"fedpriv.clients", "fedpriv.flower", "fedpriv.server"}
REACH_ENDS = {"fedpriv.flower", "simulations"}
FOREIGN = {
    "fedpriv.ledger": {"numpy"},
    "fedpriv.accounting": {"numpy", "scipy"},
    "fedpriv.privacy": {"numpy", "cryptography", "mpmath", "torch", "triton"},
    "fedpriv.training": {"numpy", "safetensors", "scipy", "torch"},
    "fedpriv.audit": {"numpy", "scipy"},
    "fedpriv.analytics": {"numpy", "scipy"},
    "fedpriv.wire": {"numpy", "cryptography", "google"},
}
# Flower is for those who install the extra; all else must work without it.
FLOWER = {"fedpriv.flower", "simulations"}


def package_of(name: str) -> str:
    """The entry of ALLOWED that a module belongs to."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "fedpriv" else parts[0]


def modules() -> list[tuple[str, Path]]:
    found = []
    for top in ("fedpriv", "clients", "server", "simulations"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            name = f"fedpriv.{name}" if top in {"clients", "server"} else name
            if name != "fedpriv":
                found.append((name, path))
    return found


def imports(name: str, path: Path) -> set[str]:
    """Modules that a file imports anywhere, relative imports resolved."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.rsplit(".", node.level)[0] + "." if node.level else ""
            found.add(base + (node.module or ""))
    return found


@pytest.mark.parametrize(("name", "path"), modules(), ids=str)
def test_imports_follow_the_layout(name: str, path: Path) -> None:
    package = package_of(name)
    allowed = ALLOWED[package] | {package, "fedpriv.errors"}
    if package != "fedpriv.errors":
        allowed |= {"fedpriv.support"}
    for imported in imports(name, path):
        top = imported.split(".")[0]
        end = ".".join(imported.split(".")[:2])
        if end in ENDS and end != package:
            assert package in REACH_ENDS, f"{name} imports {imported}"
        if imported == "fedpriv":  # its version; it has nothing else
            continue
        if top in {"fedpriv", "clients", "server", "simulations"}:
            reached = [a for a in allowed if imported == a or imported.startswith(f"{a}.")]
            assert reached, f"{name} imports {imported}; allowed are {sorted(allowed)}"
        elif top in {"flwr", "ray"}:
            assert package in FLOWER, f"{name} imports {imported}"
        elif package in FOREIGN and top not in sys.stdlib_module_names:
            assert top in FOREIGN[package], f"{name} imports {imported}"


def test_no_packages_import_each_other_in_a_circle() -> None:
    TopologicalSorter(ALLOWED).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(ALLOWED | {"fedpriv.ledger": {"fedpriv.accounting"}}).prepare()


# What each module loads neither itself nor through others. Those of a list are imported one after
# the other in one process, which takes seconds to start: what passes after others passes alone.
LIGHT = {
    "without pydantic": [
        ("fedpriv", "torch flwr numpy scipy"),
        ("fedpriv.support.logs", "torch grpc numpy pydantic"),
        (
            "fedpriv.cli",
            "torch grpc flwr sklearn altair scipy prometheus_client cryptography jinja2 vl_convert",
        ),
        ("fedpriv.wire", "torch grpc flwr sklearn altair pydantic"),
        ("fedpriv.accounting.accountants", "torch flwr sklearn altair pydantic"),
        ("fedpriv.ledger.ledger", "torch flwr sklearn altair pydantic"),
        ("fedpriv.privacy.gaussian_mechanism", "torch flwr sklearn altair"),
        ("fedpriv.analytics", "torch flwr sklearn altair pydantic"),
        ("fedpriv.experiment.mechanism", "torch flwr sklearn matplotlib pydantic"),
        ("fedpriv.clients.status", "torch flwr sklearn altair pydantic"),
        ("fedpriv.clients.ledger_check", "torch flwr altair"),
        ("fedpriv.training.rounds", "torch flwr sklearn altair"),
        ("fedpriv.clients.membership", "torch flwr sklearn altair"),
        ("fedpriv.flower", "torch flwr ray sklearn altair"),
        ("fedpriv.flower.ray", "torch flwr ray sklearn altair"),
        ("fedpriv.flower.strategy", "torch ray sklearn altair"),
    ],
    "without grpc": [
        ("fedpriv.clients.journal", "torch grpc flwr altair"),
        ("fedpriv.clients.consent", "torch grpc flwr altair"),
        ("fedpriv.studies", "torch grpc flwr sklearn altair"),
        ("fedpriv.report.tables", "torch grpc flwr sklearn altair"),
        ("fedpriv.server.certificates", "torch flwr sklearn altair grpc"),
        ("fedpriv.run.folder", "torch grpc flwr sklearn"),
        ("fedpriv.server.monitoring", "torch flwr prometheus_client"),
        ("fedpriv.run.simulate", "flwr ray grpc"),
        ("fedpriv.server.deployment", "flwr ray"),
    ],
}
ONE_BY_ONE = """
import importlib, sys
for name, *forbidden in map(str.split, sys.stdin):
    importlib.import_module(name)
    if loaded := {*forbidden} & {*sys.modules}:
        print(name, "loads", *sorted(loaded))
"""


@pytest.mark.parametrize("modules", LIGHT.values(), ids=LIGHT)
def test_importing_loads_nothing_heavy(modules: list[tuple[str, str]]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE],
        input="\n".join(map(" ".join, modules)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ""
