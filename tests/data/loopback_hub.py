"""A Hugging Face hub on loopback with one dataset: as much as the package `datasets` asks for."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "a" * 40


@contextmanager
def hub(name: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve a dataset of files; yields the address of the hub."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.respond()

        def do_GET(self) -> None:
            self.respond()

        def respond(self) -> None:
            path = self.path.partition("?")[0]
            for start in (f"/datasets/{name}/resolve/{at}/" for at in (COMMIT, "main")):
                if path.startswith(start):
                    self.send_file(files.get(path.removeprefix(start)))
                    return
            if path.startswith(f"/api/datasets/{name}/tree/{COMMIT}"):
                inside = path.partition(COMMIT)[2].strip("/")
                self.send_json(listed(inside))
            elif path in (f"/api/datasets/{name}", f"/api/datasets/{name}/revision/{COMMIT}"):
                self.send_json({"id": name, "sha": COMMIT, "tags": [], "siblings": []})
            else:
                self.send(404, b"", {"x-error-code": "RepoNotFound"})

        def send_file(self, content: bytes | None) -> None:
            headers = {"x-repo-commit": COMMIT}
            if content is None:
                self.send(404, b"", {**headers, "x-error-code": "EntryNotFound"})
            else:
                self.send(200, content, {**headers, "etag": f'"{digest(content)}"'})

        def send_json(self, value: object) -> None:
            self.send(200, json.dumps(value).encode(), {"content-type": "application/json"})

        def send(self, code: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(code)
            for header, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    def listed(inside: str) -> list[dict[str, object]]:
        """What is in a folder; folders of the topmost one are entries too."""
        found: list[dict[str, object]] = []
        for path, content in files.items():
            if path.rpartition("/")[0] == inside:
                size = len(content)
                found.append({"type": "file", "path": path, "size": size, "oid": digest(content)})
        if not inside:
            folders = {path.partition("/")[0] for path in files if "/" in path}
            found += [{"type": "directory", "path": path, "oid": COMMIT} for path in folders]
        return found

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
