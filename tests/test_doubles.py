"""The double itself: its machines, images, faults and journal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from doubles import machines
from doubles.client import vendors
from doubles.images import BuildError, Images, Step, parse_dockerfile
from doubles.machines import Machines

pytestmark = pytest.mark.skipif(
    bool(machines.available()), reason=f"needs bubblewrap: {machines.available() or 'it is here'}"
)


async def test_a_machine_runs_commands_apart_from_the_host(tmp_path: Path) -> None:
    fleet = Machines(tmp_path / "m")
    image = await Images(tmp_path / "i", fleet).base("debian:12")
    machine = await fleet.create(image.root, network=False)
    try:
        done = await machine.run(["sh", "-c", "echo $$; ls /proc | grep -c '^[0-9]'; cat /proc/net/dev"])
        assert done.code == 0
        pid, processes = done.text.split()[:2]
        assert int(pid) < 20
        assert int(processes) < 6
        assert "eth" not in done.text
        assert (await machine.run(["ls", str(Path.cwd())])).code != 0
        assert (await machine.run(["sh", "-c", "exit 3"])).code == 3
        assert (await machine.run(["sh", "-c", "kill -9 $$"])).code == 137
        assert (await machine.run(["cat"], stdin=b"a\0b")).stdout == b"a\0b"
        assert (await machine.run(["id", "-un"], user="daytona")).text == "daytona\n"
        assert (await machine.run(["pwd"], cwd="/absent")).code == 126
        with pytest.raises(LookupError, match="nonesuch"):
            await machine.run(["id"], user="nonesuch")
    finally:
        await fleet.aclose()
    assert not machine.alive
    assert not machine.root.exists()


async def test_a_command_is_killed_by_itself(tmp_path: Path) -> None:
    fleet = Machines(tmp_path / "m")
    image = await Images(tmp_path / "i", fleet).base("debian:12")
    machine = await fleet.create(image.root)
    try:
        process = await machine.spawn(["sh", "-c", "sleep 300 >/dev/null & exec sleep 301"])
        listing = [
            "sh",
            "-c",
            "for p in /proc/[0-9]*/cmdline; do tr '\\0' ' ' < $p | sed 's/ $//'; echo; done",
        ]
        async with asyncio.timeout(10):
            both = {"sleep 300", "sleep 301"}
            while not both <= set((await machine.run(listing)).text.splitlines()):
                await asyncio.sleep(0.01)
            pids = machine.inside(process)
            assert pids is not None
            assert pids[1] > 1
            machine.kill(process)
            assert await machine.ended(process) == 137
        left = await machine.run(listing)
        assert "sleep 300" in left.text
        assert "sleep 301" not in left.text
    finally:
        await fleet.aclose()


async def test_an_image_is_built_once(tmp_path: Path) -> None:
    fleet = Machines(tmp_path / "m")
    images = Images(tmp_path / "i", fleet)
    base, steps = parse_dockerfile(
        "# a comment\nFROM debian:12\nENV A=1 B='two words'\nWORKDIR /app\nRUN echo $A > made && \\\n"
        '  echo "$B" >> made\nUSER daytona\nCMD ["sleep"]\n'
    )
    one, two = await asyncio.gather(images.build(base, steps), images.build(base, steps))
    assert one is two
    assert images.builds == 1
    assert (one.workdir, one.user, one.env) == ("/app", "daytona", {"A": "1", "B": "two words"})
    machine = await fleet.create(one.root, workdir=one.workdir, user=one.user, env=one.env)
    done = await machine.run(["sh", "-c", "cat made; id -un; echo $B"])
    assert done.text == "1\ntwo words\ndaytona\ntwo words\n"
    await fleet.aclose()


async def test_a_failing_step_fails_the_build_with_its_log(tmp_path: Path) -> None:
    fleet = Machines(tmp_path / "m")
    images = Images(tmp_path / "i", fleet)
    lines: list[str] = []
    with pytest.raises(BuildError, match="exit code: 7"):
        await images.build("debian", [Step("RUN", ["echo the reason; exit 7"])], log=lines.append)
    assert "the reason" in lines
    with pytest.raises(BuildError, match="not found"):
        await images.build("absent/image:1", [])
    with pytest.raises(BuildError, match="unknown instruction: FORM"):
        parse_dockerfile("FORM debian")
    assert fleet.ids() == []
    await fleet.aclose()


def test_the_double_ends_with_its_input_and_keeps_a_journal() -> None:
    with vendors(minute=0.05) as double:
        assert double.journal() == []
        assert double.machines() == []
        with pytest.raises(Exception, match="400"):
            double.fault(nonsense=1)
        with pytest.raises(Exception, match="400"):
            double.options(nonsense=1)
    assert not Path(f"/proc/{double.pid}").exists()


async def test_the_control_port_needs_the_key() -> None:
    with vendors() as double:
        async with aiohttp.ClientSession() as session, session.get(double.url("control") + "/journal") as got:
            assert got.status == 403
