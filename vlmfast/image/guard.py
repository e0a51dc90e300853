"""What is refused before any work is done: sizes against `Limits`, and addresses that are not public."""

from __future__ import annotations

import ipaddress

from vlmfast.errors import ImageError, ImageLimitError
from vlmfast.options import Limits

_CHANNELS = 3
_MAX_EXPANSION = 500
"""Decoded bytes, in the file's own depth, that a byte of a file may stand for in the largest pictures. Photographs and
drawings stay below 300; deflate ends at 1032, where only blank pictures come near."""
_BYTES_PER_PIXEL = {"1": 0.125, "L": 1, "P": 1, "LA": 2, "I;16": 2, "I;16B": 2, "I;16L": 2, "RGBA": 4, "I": 4, "F": 4}

_SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # protocol assignments (RFC 6890)
        "192.31.196.0/24",  # AS112 (RFC 7535)
        "192.52.193.0/24",  # AMT relays (RFC 7450)
        "192.88.99.0/24",  # relays of 6to4, withdrawn (RFC 7526)
        "192.175.48.0/24",  # AS112 (RFC 7534)
        "2620:4f:8000::/48",  # AS112 (RFC 7534)
        "3fff::/20",  # documentation (RFC 9637)
        "5f00::/16",  # segment routing (RFC 9602)
    )
)
"""Ranges without web servers that `ipaddress` has as global, in some versions of Python or in all."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def check_bytes(num_bytes: int, name: str, limits: Limits) -> None:
    """Raises ImageError for an empty file and ImageLimitError for one beyond `max_image_bytes`."""
    if num_bytes == 0:
        raise ImageError(f"{name}: the file is empty")
    if num_bytes > limits.max_image_bytes:
        raise ImageLimitError(
            f"{name}: {num_bytes} bytes, the limit is {limits.max_image_bytes}; raise Limits(max_image_bytes=...)"
        )


def check_size(width: int, height: int, name: str, limits: Limits, *, decoded_bytes: int = 0) -> None:
    """Raises ImageError for a side of zero and ImageLimitError beyond `max_image_pixels` or `max_decoded_bytes`.

    `decoded_bytes` is what the request's other pictures take already.
    """
    if width < 1 or height < 1:
        raise ImageError(f"{name}: the picture has no pixels ({width}x{height})")
    if width * height > limits.max_image_pixels:
        raise ImageLimitError(
            f"{name}: {width}x{height} pixels, the limit is {limits.max_image_pixels} in all; "
            "scale it down or raise Limits(max_image_pixels=...)"
        )
    if decoded_bytes + width * height * _CHANNELS > limits.max_decoded_bytes:
        raise ImageLimitError(
            f"{name}: {width}x{height} pixels after {decoded_bytes} decoded bytes, the limit of a request is "
            f"{limits.max_decoded_bytes}; send fewer or smaller pictures or raise Limits(max_decoded_bytes=...)"
        )


def check_expansion(width: int, height: int, mode: str, num_bytes: int, name: str, limits: Limits) -> None:
    """Raises ImageLimitError for a large picture whose file is too small to hold more than one colour."""
    decoded = width * height * _BYTES_PER_PIXEL.get(mode, _CHANNELS)
    if width * height > limits.max_image_pixels // 2 and decoded > num_bytes * _MAX_EXPANSION:
        raise ImageLimitError(
            f"{name}: {width}x{height} pixels out of {num_bytes} bytes, the limit for a file so small is "
            f"{limits.max_image_pixels // 2} pixels; raise Limits(max_image_pixels=...)"
        )


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet: no loopback, private, link-local, shared, multicast,
    reserved or special range, not even as an IPv4 address inside an IPv6 one (mapped, 6to4, NAT64)."""
    try:
        return _is_public(ipaddress.ip_address(address))
    except ValueError:
        return False


def _is_public(address: _Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return _is_public(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            return _is_public(inner)
        if address.is_site_local:  # fec0::/10, deprecated but still routed in places
            return False
    if any(address in network for network in _SPECIAL):  # of the other IP version: not in it
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
