"""A server on this machine that plays the internet for the tests of URLs.

Names stand for 127.0.0.1 by a resolver of our own, and that address alone counts as public. The suite looks up no real
name (conftest), so a fetch that works went to the address given.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from oracle import noise
from pictures import encode
from PIL import Image

from vlmfast.image import fetch
from vlmfast.image.guard import is_public

FILE = encode(Image.fromarray(noise(31, 17)), "JPEG")
# Made for these tests, for the name pictures.example; it protects nothing.
KEY_AND_CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgjKvKrzO9xC/Kgv32
n7CQKKWifLTdqYM2494dwZptSWehRANCAASE3NcNWZe8bH6C5u4Gpen4jMXL0Bi9
iLXB6VRiNbd7Z4JGh+SsEpLxAJM6Ki28LcF8aaW6sUM5hKgATVcsj/Tp
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBdjCCARygAwIBAgIBATAKBggqhkjOPQQDAjAbMRkwFwYDVQQDDBBwaWN0dXJl
cy5leGFtcGxlMCAXDTIwMDEwMTAwMDAwMFoYDzIxMjAwMTAxMDAwMDAwWjAbMRkw
FwYDVQQDDBBwaWN0dXJlcy5leGFtcGxlMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcD
QgAEhNzXDVmXvGx+gubuBqXp+IzFy9AYvYi1welUYjW3e2eCRofkrBKS8QCTOiot
vC3BfGmlurFDOYSoAE1XLI/06aNPME0wGwYDVR0RBBQwEoIQcGljdHVyZXMuZXhh
bXBsZTAPBgNVHRMBAf8EBTADAQH/MB0GA1UdDgQWBBTi9y6bg3HPHYT+hSUn8ysv
hkznQDAKBggqhkjOPQQDAgNIADBFAiEAusBFagVKKGeQZIPDhQYt8oIRWtEjpvyX
6om54uXp/W8CIDsE4NNTejpggaFQlN7JdXR3QIJPvL9VmBZqKia5EZ5K
-----END CERTIFICATE-----
"""


class _Handler(BaseHTTPRequestHandler):
    """Each path behaves as its name says."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append((self.headers["Host"], self.path))
        name = self.path.strip("/").partition("/")[0].partition("?")[0]
        getattr(self, f"_{name}", self._file)()
        self.close_connection = True

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for header, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(header.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _file(self) -> None:
        self._answer(200, FILE)

    def _empty(self) -> None:
        self._answer(200)

    def _page(self) -> None:
        self._answer(200, b"<html>Please sign in</html>")

    def _missing(self) -> None:
        self._answer(404)

    def _broken(self) -> None:
        self._answer(503, b"no")

    def _compressed(self) -> None:
        self._answer(200, FILE, Content_Encoding="gzip")

    def _cut(self) -> None:
        self._answer(200, FILE, Content_Length=str(len(FILE) + 100))

    def _huge(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(10**12))
        self.end_headers()
        self._silent()

    def _endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        self._drip(b"x" * 1000, pause=0.0)

    def _slow(self) -> None:
        self.send_response(200)
        self.end_headers()
        self._drip(b"x", pause=0.05)

    def _header(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        self._drip(b"x", pause=0.05)

    def _silent(self) -> None:
        self.server.closing.wait(20)

    def _to(self) -> None:
        self._answer(302, Location=self.path.partition("?")[2])

    def _nowhere(self) -> None:
        self._answer(302)

    def _loop(self) -> None:
        self._answer(307, Location="/loop")

    def _drip(self, piece: bytes, *, pause: float) -> None:
        """Sends pieces until the other side hangs up, which the test waits for."""
        try:
            while not self.server.closing.is_set():
                self.wfile.write(piece)
                self.server.sent += len(piece)
                time.sleep(pause)
        except OSError:
            self.server.hung_up.set()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str]] = []
        self.sent = 0
        self.hung_up = threading.Event()
        self.closing = threading.Event()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def url(self, path: str, host: str = "pictures.example") -> str:
        return f"http://{host}:{self.port}{path}"

    def secure(self, folder: Path) -> ssl.SSLContext:
        """Goes behind TLS, with a certificate for pictures.example; returns a client's context that trusts it."""
        file = folder / "certificate.pem"
        file.write_text(KEY_AND_CERTIFICATE)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        return ssl.create_default_context(cadata=KEY_AND_CERTIFICATE[KEY_AND_CERTIFICATE.index("-----BEGIN CERT") :])

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients of these tests hang up


@contextmanager
def serving() -> Iterator[Server]:
    running = Server()
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield running
    finally:
        running.closing.set()
        running.shutdown()
        running.server_close()


NAMES = {
    "pictures.example": ["127.0.0.1"],
    "other.example": ["127.0.0.1"],
    "inside.example": ["10.0.0.5"],
    "half.example": ["127.0.0.1", "192.168.0.1"],
    "dead.example": ["127.0.0.9", "127.0.0.1"],
    "metadata.example": ["169.254.169.254"],
    "empty.example": [],
}


def replace_resolver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gives the names above to the loader; returns the list of those looked up, which grows."""
    looked_up: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        looked_up.append(host)
        if host not in NAMES and not host.replace(".", "").isdigit():
            raise OSError(-2, "Name or service not known")
        return NAMES.get(host, [host])

    monkeypatch.setattr(fetch, "resolve", resolve)
    monkeypatch.setattr(fetch, "is_public", lambda address: address.startswith("127.") or is_public(address))
    return looked_up
