"""Which addresses a completion notice may be sent to.

Invariant: an address is judged after its name was resolved, and the connection goes to an address that was judged:
a name that resolves differently the next moment gains nothing by it.
"""

from __future__ import annotations

import asyncio
import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

_TRANSLATED = IPv6Network("64:ff9b::/96")  # an IPv4 address in its last 32 bits


_DOCUMENTED = IPv6Network("3fff::/20")  # for examples alone, which some versions of Python do not know


class RefusedAddressError(Exception):
    """The host is, or may be, one that notices must not go to."""


async def public_addresses(host: str, port: int, *, allow_private: bool = False) -> list[str]:
    """Resolve a host; raise if any of its addresses is not a public one, unless that is allowed."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not allow_private:
        for address in addresses:
            if not is_public(address):
                raise RefusedAddressError("the receiver's address is not public; see callback_allow_private")
    return addresses


def is_public(text: str) -> bool:
    """Tell whether an address belongs to the public internet, looking into addresses that carry another."""
    address = ip_address(text)
    return all(_is_plainly_public(each) for each in (address, *_carried(address)))


def _is_plainly_public(address: Address) -> bool:
    if isinstance(address, IPv6Address) and (address.is_site_local or address in _DOCUMENTED):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _carried(address: Address) -> list[IPv4Address]:
    if isinstance(address, IPv4Address):
        return []
    carried = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _TRANSLATED:
        carried.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in carried if each is not None]
