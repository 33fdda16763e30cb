"""A double of `python -m sglang.launch_server`: a release's own options, its protocol, and no model.

`DOUBLE` in the environment says how it misbehaves: `dies` while starting, `hangs` there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from importlib import metadata
from pathlib import Path


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments as strictly as the release does: what it does not know ends the program."""
    parser = argparse.ArgumentParser("launch_server", allow_abbrev=False)
    for row in (Path(__file__).parent / "options.txt").read_text().split():
        option, equals, rest = row.partition("=")
        how = {"nargs": "+" if rest else None} if equals else {"action": "store_true"}
        parser.add_argument(option, **how)
    return parser.parse_args(argv)


def ranks(args: argparse.Namespace) -> int:
    return int(getattr(args, "attn_dp_size", None) or args.dp_size or 1)


async def serve(args: argparse.Namespace) -> None:
    from rollhook.testing.fake_engine import FakeEngine, drawn

    engine = FakeEngine(
        lambda ids, params: drawn(200, length=max(params["max_new_tokens"], 1))(ids, params),
        version=int(args.weight_version),
        token_seconds=0.001,
        queue_seconds=0.0,
        dp_size=ranks(args),
        sglang=metadata.version("sglang"),
        host=args.host,
        port=int(args.port),
    )
    engine.incremental = bool(getattr(args, "incremental_streaming_output", False))
    engine.model_path = args.model_path
    if os.environ.get("DOUBLE") != "hangs" and args.node_rank in (None, "0"):
        await engine.start()
    print("The server is fired up and ready to roll!", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    args = parse(sys.argv[1:])
    print("server_args=" + " ".join(sys.argv[1:]), flush=True)
    if not Path(args.model_path).is_dir():
        sys.exit(f"OSError: {args.model_path} is not a local folder")
    if os.environ.get("DOUBLE") == "dies":
        sys.exit("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
