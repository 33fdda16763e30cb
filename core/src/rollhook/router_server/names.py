"""Names of workers at the router's edge: `URL`, or `URL@RANK` for one rank of a data-parallel engine.

This is how SGLang's router names them. Inside the process a worker is a base URL and a rank, two fields.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

from rollhook.router import Worker

_RANKED = re.compile(r"(.+)@([0-9]{1,6})", re.DOTALL)


def parse_name(text: str) -> Worker:
    """Return the worker that a name means; only a number behind the last `@` is a rank.

    Raises ValueError for what is no base URL: http or https, a host, no user, query or fragment.
    """
    ranked = _RANKED.fullmatch(text)
    url, rank = (ranked[1], int(ranked[2])) if ranked else (text, None)
    return Worker(base_url(url), rank)


def worker_name(worker: Worker) -> str:
    """Return a worker's name, which `parse_name` reads."""
    return worker.url if worker.dp_rank is None else f"{worker.url}@{worker.dp_rank}"


def worker_id(worker: Worker) -> str:
    """Return the id of a worker in the worker API: a UUID, the same whenever it is registered."""
    return str(uuid5(NAMESPACE_URL, worker_name(worker)))


def base_url(text: str) -> str:
    """Return an engine's base URL without a slash at its end. Raises ValueError for what is none."""
    try:
        url = urlsplit(text)
        good = bool(url.hostname) and url.port != 0 and text.startswith(("http://", "https://"))
    except ValueError:
        good = False
    if any(sign in text for sign in "@?#"):  # the text may hold a password, so it is not quoted
        raise ValueError("the base URL of an engine has no user, query or fragment")
    if not good or not text.isprintable() or " " in text:
        raise ValueError(f"{text!r} is no base URL of an engine; write one like http://10.0.0.7:30000")
    return text.rstrip("/")
