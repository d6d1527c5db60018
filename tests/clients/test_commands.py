"""The commands of a node register with any command line, and load nothing heavy for it."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from fedpriv.clients.commands import register
from fedpriv.errors import InvalidValueError


def app_of_a_node() -> typer.Typer:
    app = typer.Typer()
    register(app)
    return app


def test_both_commands_are_there_and_say_what_they_are_for() -> None:
    text = CliRunner().invoke(app_of_a_node(), ["--help"]).output
    assert all(f" {command} " in text for command in ("join", "status"))


@pytest.mark.parametrize(
    "arguments",
    [
        "status --server localhost:1",
        "join --server localhost:1 --users u:u --certificates c --node n",
    ],
)
def test_exactly_one_identity_is_given(arguments: str) -> None:
    result = CliRunner().invoke(app_of_a_node(), arguments.split())
    assert isinstance(result.exception, InvalidValueError)
    assert "exactly one must be given" in str(result.exception)


@pytest.mark.parametrize(
    ("users", "trust", "sentence"),
    [
        ("nowhere", "a.b:c", "users 'nowhere' do not exist; legal are a folder"),
        ("a.b:c", "a.b", "--trust 'a.b' is not of the form package.module:function"),
        ("a.b:c", "a.b:", "--trust 'a.b:' is not of the form package.module:function"),
    ],
)
def test_a_misspelt_path_is_refused_before_torch_is_loaded(users, trust, sentence) -> None:
    given = "join", "--server", "localhost:1", "--node", "n", "--users", users, "--trust", trust
    check = f"""
import sys
from typer.testing import CliRunner
from tests.clients.test_commands import app_of_a_node
error = CliRunner().invoke(app_of_a_node(), {given}).exception
print(type(error).__mro__[1].__name__, error, "torch" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("FedprivError ")
    assert sentence in done.stdout
    assert done.stdout.endswith(" False\n")


def test_registering_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'grpc', 'flwr', 'numpy', 'scipy', 'pydantic', 'cryptography'}"
    check = f"import sys, fedpriv.clients.commands; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
