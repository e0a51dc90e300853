"""Pictures by URL: what is fetched, what is refused, and that nothing inner is reached (cases.md 47, 48)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from internet import FILE, Server, replace_resolver, serving

from vlmfast import Limits, load_image
from vlmfast.errors import ImageError, ImageFetchError, ImageLimitError
from vlmfast.image import fetch
from vlmfast.image.guard import is_public


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def internet(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were looked up."""
    return replace_resolver(monkeypatch)


def test_a_url_is_one_more_door(server: Server, internet: list[str]) -> None:
    """Guards identity (the same digest as by bytes), the name sent to the server, and one look-up: the checked address
    is the one connected to, as this suite can look up no other."""
    image = load_image(server.url("/photos/dog.jpg?size=5"))
    assert image.digest == load_image(FILE).digest
    assert image.name == server.url("/photos/dog.jpg")
    assert server.requests == [(f"pictures.example:{server.port}", "/photos/dog.jpg?size=5")]
    assert internet == ["pictures.example"]


def test_names_are_looked_up_once_a_hop(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rebinding: a name server that answers with an inner address the second time is not asked again."""
    answers = iter([["127.0.0.1"], ["10.0.0.5"]])
    monkeypatch.setattr(fetch, "resolve", lambda host, port: next(answers))
    assert load_image(server.url("/a.jpg")).width == 31
    with pytest.raises(ImageFetchError, match="not on the public internet"):
        load_image(server.url("/a.jpg"))
    assert len(server.requests) == 1


def test_the_next_address_is_tried(server: Server) -> None:
    """Guards names of several addresses: one that refuses is no reason to fail."""
    assert load_image(server.url("/a.jpg", "dead.example")).width == 31


@pytest.mark.parametrize("name", ["inside.example", "half.example", "metadata.example", "10.0.0.1", "empty.example"])
def test_inner_addresses_are_refused(name: str, server: Server) -> None:
    """Guards case 47 (vllm 57157): every address of a name has to be public, not only one of them."""
    with pytest.raises(ImageFetchError, match=f"{name} is not on the public internet"):
        load_image(server.url("/a.jpg", name))
    assert not server.requests


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1",
        "fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:7f00:1::", "::127.0.0.1", "localhost", "", "1.2.3",
        "192.88.99.1", "192.88.99.255", "192.0.0.9", "192.31.196.1", "192.52.193.1", "192.175.48.6", "3fff::1",
        "3fff:fff:ffff::1", "5f00::1", "2620:4f:8000::1", "::ffff:192.88.99.1", "64:ff9b::192.88.99.1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    """Guards case 47: each range by itself, also inside IPv6."""
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "172.32.0.1", "192.88.98.1"],
)
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


def test_the_real_resolver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the parts that the other tests replace: a local name, and odd spellings of its address, are refused."""
    monkeypatch.undo()
    for host in ("127.0.0.1", "[::1]", "localhost"):
        with pytest.raises(ImageFetchError, match="not on the public internet"):
            load_image(f"http://{host}:9/a.png")
    assert "127.0.0.1" in fetch.resolve("localhost", 80)


def test_redirects_are_followed_and_checked(server: Server, internet: list[str]) -> None:
    """Guards case 47: a public name that redirects inside. Each hop is looked up and checked."""
    image = load_image(server.url("/to?" + server.url("/to?/last.jpg", "other.example")))
    assert image.digest == load_image(FILE).digest
    assert internet == ["pictures.example", "other.example", "other.example"]
    for target in ("http://10.0.0.1/a.png", "//metadata.example/latest", server.url("/a.jpg", "half.example")):
        with pytest.raises(ImageFetchError, match=r"pictures\.example.* is not on the public internet"):
            load_image(server.url("/to?" + target))
    for target in ("file:///etc/passwd", "ftp://pictures.example/a", "data:image/png;base64,AAAA", "gopher://x"):
        with pytest.raises(ImageFetchError, match=r"only http:// and https://|not a valid URL"):
            load_image(server.url("/to?" + target))
    server.requests.clear()
    with pytest.raises(ImageFetchError, match="redirected more than 5 times"):
        load_image(server.url("/loop"))
    assert len(server.requests) == 6
    with pytest.raises(ImageFetchError, match="answered 302"):
        load_image(server.url("/nowhere"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/missing", "answered 404 Not Found"),
        ("/broken", "answered 503"),
        ("/compressed", "encoding gzip"),
        ("/cut", "could not be fetched"),
    ],
)
def test_failures_say_what_happened(path: str, message: str, server: Server) -> None:
    """Guards case 48 (vllm 47163): an answer other than a file is bad input that says so."""
    with pytest.raises(ImageFetchError, match=message) as caught:
        load_image(server.url(path + "?key=secret"))
    assert f"{server.url(path)}: " in str(caught.value)
    assert "secret" not in str(caught.value)


def test_answers_that_are_no_picture(server: Server) -> None:
    with pytest.raises(ImageError, match=r"/page: not a picture"):
        load_image(server.url("/page"))
    with pytest.raises(ImageError, match=r"/empty: the file is empty"):
        load_image(server.url("/empty"))


def test_large_answers_are_not_read(server: Server) -> None:
    """Guards the byte cap: by the length that is announced, and while reading where none is."""
    limits = Limits(max_image_bytes=len(FILE) - 1, fetch_timeout_s=2)
    with pytest.raises(ImageLimitError, match="max_image_bytes"):
        load_image(server.url("/huge"), limits=limits)
    with pytest.raises(ImageLimitError, match="max_image_bytes"):
        load_image(server.url("/endless"), limits=Limits(max_image_bytes=100_000))
    assert server.hung_up.wait(20)
    assert load_image(server.url("/a.jpg"), limits=Limits(max_image_bytes=len(FILE))).width == 31


@pytest.mark.parametrize("path", ["/silent", "/slow", "/header"])
def test_slow_answers_end(path: str, server: Server) -> None:
    """Guards the time cap: a byte now and then, in the body or in the headers, does not prolong it."""
    with pytest.raises(ImageFetchError, match=r"timed out after 0\.3 s"):
        load_image(server.url(path), limits=Limits(fetch_timeout_s=0.3))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://nowhere.example/a.png", "no address is known for nowhere.example"),
        ("http://", "only http"), ("http:///a.png", "only http"), ("http://[::1", "valid URL|only http"),
        ("http://a b/c", "valid URL|no address"), ("http://pictures.example:99999/a", "valid URL|port 99999 is none"),
        ("https://xn--/", "valid URL|no address"), ("http://" + "a" * 300 + "/", "valid URL|no address"),
    ],
)  # fmt: skip
def test_urls_that_can_not_be(url: str, message: str) -> None:
    """Guards addresses that are no addresses: an error of ours, whatever the parser raises."""
    with pytest.raises(ImageFetchError, match=message):
        load_image(url)


def test_refused_connections(server: Server) -> None:
    server.shutdown()
    server.server_close()
    with pytest.raises(ImageFetchError, match="could not be fetched"):
        load_image(server.url("/a.jpg"))


def test_other_schemes() -> None:
    for url in ("ftp://pictures.example/a.png", "S3://bucket/key", "gopher://x"):
        with pytest.raises(ImageError, match="is not supported"):
            load_image(url)


def test_switched_off(server: Server) -> None:
    """Guards what a server does: nothing is looked up or connected to."""
    with pytest.raises(ImageFetchError, match="allow_urls"):
        load_image(server.url("/a.jpg"), limits=Limits(allow_urls=False))
    assert not server.requests


def test_credentials_are_used_and_not_shown(server: Server) -> None:
    with pytest.raises(ImageFetchError) as caught:
        load_image(f"http://user:secret@pictures.example:{server.port}/missing")
    assert "secret" not in str(caught.value) and "pictures.example" in str(caught.value)


def test_proxies_of_the_environment_are_not_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the pin: a proxy would look the name up on its own."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert load_image(server.url("/a.jpg")).width == 31


def test_certificates_are_checked_against_the_name(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the pin under TLS: the connection goes to an address, the certificate has to be the name's."""
    trusting = server.secure(tmp_path)
    monkeypatch.setattr(fetch, "_certificates", lambda: trusting)

    def secure(url: str) -> str:
        return url.replace("http:", "https:", 1)

    assert load_image(secure(server.url("/a.jpg"))).width == 31
    assert server.requests[-1][0] == f"pictures.example:{server.port}"
    with pytest.raises(ImageFetchError, match=r"other\.example.*(?i:certificate)"):
        load_image(secure(server.url("/a.jpg", "other.example")))
    with pytest.raises(ImageFetchError, match="timed out"):
        load_image(secure(server.url("/header")), limits=Limits(fetch_timeout_s=0.5))


@pytest.mark.parametrize("port", ["0", "65536", "99999999999999999999"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    """Guards against an OverflowError of the resolver."""
    with pytest.raises(ImageFetchError, match=f"port {port} is none"):
        load_image(f"http://1.1.1.1:{port}/x.png")
