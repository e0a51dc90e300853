"""Fetches a picture from a URL without becoming a way into the local network.

Only http and https; every address that a host name stands for must be public, and the connection goes to the very
address that was checked (the name stays in `Host` and in the TLS handshake), so a name server that answers otherwise
the second time gains nothing. Redirects are followed by hand, each checked alike. Size and time are bounded whatever
the other side does. Proxies of the environment are not used: they would look names up on their own.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from vlmfast.errors import ImageFetchError, ImageLimitError
from vlmfast.image.guard import is_public
from vlmfast.options import Limits

if TYPE_CHECKING:
    import ssl

    import httpx

_MAX_REDIRECTS = 5
_HEADERS = {"Accept": "image/*,*/*;q=0.5", "Accept-Encoding": "identity", "User-Agent": "vlmfast"}


def fetch(url: str, limits: Limits) -> bytes:
    """The content behind an http(s) URL.

    Raises:
        ImageFetchError: URLs are switched off, the address is not public, or there is no answer of status 200 in time.
        ImageLimitError: the content is larger than `max_image_bytes`; it is not read further.
    """
    if not limits.allow_urls:
        raise ImageFetchError(f"{shown_url(url)}: fetching URLs is switched off; Limits(allow_urls=True) allows it")
    import httpx

    deadline = _Deadline(limits.fetch_timeout_s)
    here = url
    try:
        with httpx.Client(verify=_certificates(), trust_env=False, headers=_HEADERS) as client:
            for _ in range(_MAX_REDIRECTS + 1):
                with _get(client, here, url, deadline) as response:
                    target = response.headers.get("Location") if response.is_redirect else None
                    if target is None:
                        return _body(response, url, limits, deadline)
                    here = str(httpx.URL(here).join(target))
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ImageFetchError(f"{shown_url(url)}: not a valid URL ({error})") from error
    except httpx.HTTPError as error:
        if deadline.is_over or isinstance(error, httpx.TimeoutException):
            raise deadline.error(url) from error
        raise ImageFetchError(f"{shown_url(url)}: could not be fetched ({error})") from error
    raise ImageFetchError(f"{shown_url(url)}: redirected more than {_MAX_REDIRECTS} times")


def shown_url(url: str) -> str:
    """A URL as messages show it: no user name, no password, no query, which may be a key."""
    try:
        parts = urlsplit(url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    except ValueError:
        return url.partition("?")[0]


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host name, as the system's resolver has them."""
    return list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


@cache
def _certificates() -> ssl.SSLContext:
    """What TLS trusts: certifi's authorities, or SSL_CERT_FILE's. Reading them takes a third of a second."""
    import httpx

    return httpx.create_ssl_context()


class _Deadline:
    """An end for the whole of a fetch. A socket's own time-out begins anew with every byte that comes."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.001)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def error(self, url: str) -> ImageFetchError:
        return ImageFetchError(f"{shown_url(url)}: timed out after {self._seconds:g} s (Limits(fetch_timeout_s=...))")

    @contextmanager
    def enforced(self) -> Iterator[Callable[[str, dict[str, Any]], None]]:
        """Hands out a `trace` for httpx; the connection made under it is cut at the deadline, whoever waits for it."""
        streams: list[Any] = []

        def cut() -> None:
            if streams:
                with suppress(OSError):
                    streams[-1].get_extra_info("socket").shutdown(socket.SHUT_RDWR)

        def trace(event: str, info: dict[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                streams.append(info["return_value"])
                if self.is_over:  # the timer has passed without a connection to cut
                    cut()

        timer = threading.Timer(self.left, cut)
        timer.daemon = True
        timer.start()
        try:
            yield trace
        finally:
            timer.cancel()


@contextmanager
def _get(client: httpx.Client, here: str, url: str, deadline: _Deadline) -> Iterator[httpx.Response]:
    """The answer of the first address that takes the connection, its body not read."""
    import httpx

    target = httpx.URL(here)
    addresses = _checked_addresses(target, url)
    with deadline.enforced() as trace:
        for index, address in enumerate(addresses):
            if deadline.is_over:
                raise deadline.error(url)
            request = client.build_request(
                "GET",
                target.copy_with(host=address),
                headers={"Host": target.netloc.decode("ascii")},
                timeout=httpx.Timeout(deadline.left, connect=deadline.left / (len(addresses) - index)),
                extensions={"sni_hostname": target.raw_host.decode("ascii"), "trace": trace},
            )
            try:
                response = client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if index + 1 == len(addresses):
                    raise
                continue
            try:
                yield response
            finally:
                response.close()
            return


def _checked_addresses(target: httpx.URL, url: str) -> list[str]:
    """The addresses of a URL's host, all of them public."""
    name = shown_url(url)
    if target.scheme not in ("http", "https") or not target.host:
        raise ImageFetchError(f"{name}: leads to {shown_url(str(target))}; only http:// and https:// URLs are fetched")
    host = target.raw_host.decode("ascii")
    port = (443 if target.scheme == "https" else 80) if target.port is None else target.port
    if not 0 < port < 2**16:
        raise ImageFetchError(f"{name}: port {port} is none; ports go from 1 to 65535")
    try:
        addresses = resolve(host, port)
    except OSError as error:
        raise ImageFetchError(f"{name}: no address is known for {host} ({error.strerror or error})") from error
    if not addresses or not all(is_public(address) for address in addresses):
        raise ImageFetchError(f"{name}: {host} is not on the public internet; download the file and give its path")
    return addresses


def _body(response: httpx.Response, url: str, limits: Limits, deadline: _Deadline) -> bytes:
    name = shown_url(url)
    if response.status_code != 200:
        raise ImageFetchError(f"{name}: answered {response.status_code} {response.reason_phrase}".rstrip())
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise ImageFetchError(f"{name}: answered in the encoding {encoding}, which was not asked for")
    length = response.headers.get("Content-Length", "")
    too_large = ImageLimitError(
        f"{name}: more than {limits.max_image_bytes} bytes, the limit; raise Limits(max_image_bytes=...)"
    )
    if length.isdecimal() and int(length) > limits.max_image_bytes:
        raise too_large
    body = bytearray()
    for part in response.iter_raw():
        body += part
        if len(body) > limits.max_image_bytes:
            raise too_large
        if deadline.is_over:
            break
    if deadline.is_over:  # also where no length was announced, and the cut looks like the end
        raise deadline.error(url)
    return bytes(body)
