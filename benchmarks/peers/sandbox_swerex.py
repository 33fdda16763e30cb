"""The workload of sandbox.py in SWE-ReX 1.4.0, its local runtime: `sandbox_swerex.py ROUNDS COMMAND`.

It starts and stops its runtime in the process and isolates nothing. Runs with the Python of an environment
that holds SWE-ReX alone.
"""

import asyncio
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import (
    BashAction,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    WriteFileRequest,
)

logging.disable(logging.CRITICAL)


async def episode(command, directory, laps, *, session):
    began = time.perf_counter()

    def lap(name):
        nonlocal began
        now = time.perf_counter()
        laps.setdefault(name, []).append((now - began) * 1e3)
        began = now

    deployment = LocalDeployment()
    await deployment.start()
    if session:
        await deployment.runtime.create_session(CreateBashSessionRequest(startup_timeout=60))
    lap("create")
    if session:
        await deployment.runtime.run_in_session(BashAction(command=command))
    else:
        await deployment.runtime.execute(Command(command=["/bin/sh", "-c", command]))
    lap("exec")
    path = str(Path(directory) / "file")
    await deployment.runtime.write_file(WriteFileRequest(path=path, content="x" * 1000))
    lap("write")
    await deployment.runtime.read_file(ReadFileRequest(path=path))
    lap("read")
    await deployment.stop()
    lap("close")


async def main(rounds, command):
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, session in (("one command", False), ("a session", True)):
            laps = {}
            await episode(command, directory, {}, session=session)
            for _ in range(rounds if not session else max(1, rounds // 10)):
                await episode(command, directory, laps, session=session)
            found.update({f"{name}: {part}": median(times) for part, times in laps.items()})
    print(json.dumps(found))


asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
