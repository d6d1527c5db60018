"""A headless Chromium, told what to do in its own protocol over a pipe.

The protocol is https://chromedevtools.github.io/devtools-protocol: one JSON object, then a zero.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 120.0  # of patience with a loaded machine
_READ, _WRITE = 3, 4  # where Chromium reads commands and writes answers


def chromium() -> str:
    """Path of the browser; the test is skipped where there is none."""
    found = os.environ.get("FEDPRIV_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), "")
    if not found:
        pytest.skip("there is no Chromium on PATH or in FEDPRIV_CHROMIUM")
    return found


@dataclass
class Tab:
    """A page in the browser, and what it said until now."""

    commands: int  # where commands are written
    answers: int  # where answers are read
    session: str | None = None  # its id
    events: list[dict] = field(default_factory=list)  # what was reported, in order
    _last: int = 0
    _rest: bytes = b""

    def call(self, method: str, **parameters: object) -> dict:
        """Do something and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def evaluate(self, expression: str) -> object:
        """Value of an expression in the page; a promise is waited for."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Open a page of a report in a window of this width and wait until it is drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.as_uri())
        self.wait_for("!!document.querySelector('html[data-drawn]')")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + _SECONDS
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"{condition} stays false; {self.complaints()}"
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """Errors and warnings that the page or the browser reported."""
        found = []
        for event in self.events:
            match event.get("method"), event.get("params", {}):
                case "Runtime.exceptionThrown", parameters:
                    found.append(json.dumps(parameters["exceptionDetails"]))
                case "Log.entryAdded", {"entry": {"level": "error" | "warning"} as entry}:
                    found.append(entry["text"])
                case "Runtime.consoleAPICalled", {"type": "error" | "warning"} as parameters:
                    found.append(json.dumps(parameters["args"]))
        return found

    def requested(self) -> list[str]:
        """Addresses that were asked for."""
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def _next(self) -> dict:
        while b"\0" not in self._rest:
            assert select.select([self.answers], [], [], _SECONDS)[0], "Chromium does not answer"
            part = os.read(self.answers, 2**20)
            assert part, "Chromium ended"
            self._rest += part
        one, self._rest = self._rest.split(b"\0", 1)
        return json.loads(one)


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Tab]:
    """A tab of a browser that ends with the block.

    Args:
        profile: folder for the files of the browser.
    """
    program = chromium()
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()

    def connect() -> None:
        # First out of each other's way, then to where Chromium looks for them.
        high = [os.dup(to_read), os.dup(to_write)]
        os.dup2(high[0], _READ)
        os.dup2(high[1], _WRITE)

    options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
    process = subprocess.Popen(
        [program, *options, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
        preexec_fn=connect,  # noqa: PLW1509 - no threads; pass_fds keeps numbers as they are
        close_fds=False,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    try:
        os.close(to_read)
        os.close(to_write)
        tab = Tab(commands, answers)
        target = tab.call("Target.createTarget", url="about:blank")["targetId"]
        attached = tab.call("Target.attachToTarget", targetId=target, flatten=True)
        tab.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        yield tab
        tab.session = None
        tab.call("Browser.close")
        process.wait(timeout=_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(commands)
        os.close(answers)
