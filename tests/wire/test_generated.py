"""The generated code is what the documented command writes, and loads nothing heavy."""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "fedpriv" / "wire" / "federation.proto"
FILES = ["federation_pb2.py", "federation_pb2.pyi"]


def documented_command() -> list[str]:
    """The arguments of the command at the head of the .proto."""
    head = PROTO.read_text(encoding="utf-8").split("syntax =")[0]
    text = re.sub(r"\\\n//\s*", " ", head)
    (line,) = [line for line in text.splitlines() if "grpc_tools.protoc" in line]
    return shlex.split(line.removeprefix("//"))


def skip_unless_the_generator_is_the_same() -> None:
    generated = (PROTO.parent / FILES[0]).read_text(encoding="utf-8")
    (written_by,) = re.findall(r"# Protobuf Python Version: [0-9]+\.(.*)", generated)
    if find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    command = [sys.executable, "-m", "grpc_tools.protoc", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    if done.stdout.split()[-1] != written_by:
        pytest.skip(f"{done.stdout.strip()} is not {written_by}, which generated the code")


def test_generating_again_gives_the_same_bytes(tmp_path: Path) -> None:
    skip_unless_the_generator_is_the_same()
    python, *arguments = documented_command()
    assert python == "python"
    elsewhere = [argument.replace("_out=.", f"_out={tmp_path}") for argument in arguments]
    assert sum(str(tmp_path) in argument for argument in elsewhere) == len(FILES)
    subprocess.run([sys.executable, *elsewhere], cwd=ROOT, check=True)
    for name in FILES:
        written = (tmp_path / "fedpriv" / "wire" / name).read_bytes()
        assert written == (PROTO.parent / name).read_bytes(), f"{name}: run `make proto`"


def test_importing_the_wire_loads_neither_torch_nor_grpc() -> None:
    check = "import sys, fedpriv.wire; print(*({'torch', 'grpc', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
