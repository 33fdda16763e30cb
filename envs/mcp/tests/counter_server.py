"""A real MCP server, on stdio or over HTTP: a counter, a judge, and much that can go wrong."""

import asyncio
import os
import sys
import time

from fastmcp import Context, FastMCP

server = FastMCP("counter")
totals: dict[str, int] = {}


@server.tool
def add(amount: int, ctx: Context) -> int:
    """Add to the counter and return it."""
    totals[ctx.session_id] = totals.get(ctx.session_id, 0) + amount
    return totals[ctx.session_id]


@server.tool
def judge(target: int, ctx: Context) -> dict[str, float]:
    """Say whether the counter is where it should be."""
    return {"reward": float(totals.get(ctx.session_id, 0) == target)}


@server.tool
def no_judge() -> str:
    return "I cannot say"


@server.tool
def die() -> None:
    os._exit(7)


@server.tool
async def slow() -> str:
    await asyncio.sleep(60)
    return "late"


@server.tool
def much() -> str:
    return "x" * 3_000_000


@server.tool
def secret() -> str:
    return ",".join(sorted(name for name in os.environ if name in ("KEY", "UNRELATED")))


if __name__ == "__main__":
    if "--slow" in sys.argv:
        time.sleep(60)
    if "--noise" in sys.argv:
        sys.stdout.buffer.write(b"not JSON\n{}\n[1]\n" + b"y" * 100_000 + b"\n")
        sys.stdout.buffer.flush()
    if "--garbage" in sys.argv:
        sys.stdout.buffer.write(b"\xff\xfe\n")
        sys.stdout.buffer.flush()
    if "--http" in sys.argv:
        port = int(sys.argv[sys.argv.index("--http") + 1])
        server.run(transport="http", host="127.0.0.1", port=port, show_banner=False, log_level="error")
    else:
        server.run(show_banner=False)
