"""What Start, tutorials and the page on fine-tuning tell a reader to type works, in their order.

A fenced block is one of these, and all of a page happen in one empty folder:

    ```python             runs, in one session for the page
    ```python title="f"   is written to the file f; so is TOML, which always has a title
    ```sh                 runs in bash, but for lines that install fedpriv
    ```text               is what the block before printed, in part, whatever its numbers are
"""

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
START = ROOT / "docs" / "start.md"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FINE_TUNING = ROOT / "docs" / "fine-tuning.md"
INSTALLATION = re.compile(r"^(python3 -m venv .*|\. .*/activate|pip install .*)$", re.MULTILINE)
PAGES = [
    pytest.param(page, id=page.stem, marks=pytest.mark.slow)
    for page in (START, *TUTORIALS, FINE_TUNING)
]


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Language, title and text of each fenced block."""
    fence = r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$'
    return re.findall(fence, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def without_numbers(text: str) -> list[str]:
    """Lines of a text, with a # for each number or name that differs from run to run."""
    lines = re.sub(r"\b[0-9a-f.:,]*\d[0-9a-f.:,]*", "#", text).splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


@contextlib.contextmanager
def shell(folder: Path) -> Iterator[Callable[[str], str]]:
    """What runs a block in bash; what blocks leave in the background ends with this."""
    started: list[int] = []

    def run(text: str) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", text],
                cwd=folder,
                env={**os.environ, "PATH": path, "COLUMNS": "120", "NO_COLOR": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            started.append(process.pid)
            code = process.wait()
            output.seek(0)
            printed = output.read().decode()
        assert code == 0, f"{text}\n{printed}"
        return printed

    try:
        yield run
    finally:
        for group in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def free_port() -> int:
    """A port of this machine where nothing listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(autouse=True)
def modules_of_a_page(tmp_path: Path) -> Iterator[None]:
    """Other pages and tests have others of the same names."""
    yield
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_tells_to_type_works(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    session: dict[str, object] = {"__name__": "__main__"}
    printed = ""
    port = str(free_port())
    with shell(tmp_path) as run:
        for language, title, text in blocks(page):
            text = text.replace("7443", port)  # noqa: PLW2901
            if title:
                Path(title).write_text(text, encoding="utf-8")
                continue
            match language:
                case "python":
                    with contextlib.redirect_stdout(io.StringIO()) as out:
                        exec(compile(text, page.name, "exec"), session)
                    printed = out.getvalue()
                case "sh":
                    printed = run(INSTALLATION.sub("", text))
                case "text":
                    shown = "\n".join(without_numbers(printed))
                    missing = [line for line in without_numbers(text) if line not in shown]
                    assert not missing, f"{missing} not in\n{printed}"
                case _:
                    pytest.fail(f"{page.name} has a block of {language!r} without a title")


def test_start_gets_to_an_epsilon_in_ten_lines() -> None:
    (lines,) = (text for kind, _, text in blocks(START) if kind == "python" and "simulate" in text)
    assert "import fedpriv" in lines
    assert "run.epsilon" in lines
    assert len([line for line in lines.splitlines() if line.strip()]) <= 10
