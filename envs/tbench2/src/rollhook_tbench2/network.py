"""What a task may reach: a mode, and host names where the mode is a list of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Literal

Mode = Literal["public", "no-network", "allowlist"]

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Policy:
    """What may be reached; `hosts` only with the mode `allowlist`."""

    mode: Mode = "public"
    hosts: tuple[str, ...] = ()

    @property
    def capability(self) -> str:
        """The capability that a sandbox needs to keep this policy."""
        return {"public": "network_on", "no-network": "network_off", "allowlist": "network_allowlist"}[
            self.mode
        ]

    def __str__(self) -> str:
        return f"{self.mode!r} ({', '.join(self.hosts)})" if self.hosts else repr(self.mode)


def host_name(entry: str) -> str:
    """Return a host name in its one form.

    Raises ValueError for what is none, and for addresses, ranges and wildcards, which no sandbox here keeps.
    """
    name = entry.strip().lower().rstrip(".")
    try:
        ip_network(name, strict=False)
    except ValueError:
        pass
    else:
        raise ValueError(f"{entry!r} is an address; sandboxes take host names only")
    if name.startswith("*."):
        raise ValueError(f"{entry!r} is a wildcard; sandboxes take whole host names only")
    if not name or not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError(f"{entry!r} is no host name (no URL, port or path)")
    return name
