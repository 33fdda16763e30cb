"""Clusters on this machine and over a real ssh; Ray's own processes are a double (see test_clusters_real)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_hosts import ADDRESSES, Site, Sshd, alive_with, double_python, free_ports, listening, sshd, until

from rollhook.errors import LauncherError, RollhookError, Unsupported, UsageError
from rollhook.launcher import ClusterOptions
from rollhook_ray import clusters_host, clusters_node
from rollhook_ray.cluster_keys import ClusterKeys
from rollhook_ray.clusters_record import new_record, read_record, record_path, token_path, write_record


@pytest.fixture
def short() -> Iterator[Path]:
    """Give a directory with a short path."""
    path = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def site(tmp_path: Path, short: Path) -> Iterator[Site]:
    """Give a cluster on this machine whose Ray is a double; nothing of it is left."""
    keys = {
        "name": "mvp",
        "ports": free_ports(),
        "temp_root": str(short),
        "python": double_python(tmp_path),
        "stop_seconds": 1.0,
        "start_seconds": 20.0,
        "old_sessions": f"{short}/*",
        "old_containers": (),
    }
    yield Site(tmp_path, keys)
    for state in clusters_node.read_states("mvp").values():
        clusters_node.end_node(state)
    assert not alive_with(f"--temp-dir={short}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    directory = tmp_path_factory.mktemp("sshd")
    with sshd(directory, directory / "state") as running:
        yield running


@pytest.fixture
def hosts(site: Site, server: Sshd, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Give the same cluster over ssh, on three addresses; here and there are known by the same directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(server.config.parent / "state"))
    site.keys |= {"by": "ssh", "hosts": list(ADDRESSES), "ssh": server.keys()}
    yield site
    for state in clusters_node.read_states("mvp").values():
        clusters_node.end_node(state)
    shutil.rmtree(record_path("mvp").parent, ignore_errors=True)


def belonging() -> list[int]:
    table = clusters_node.processes()
    states = clusters_node.read_states("mvp").values()
    return [each.pid for state in states for each in clusters_node.belonging(state, table)]


def let_go(short: Path) -> None:
    """Let nodes that are held come up."""
    (next(short.glob("rh-*")) / "go").touch()


def gone(pids: list[int]) -> bool:
    return not any(clusters_node.process(pid) for pid in pids)


async def test_a_cluster_comes_up_is_kept_and_ends_with_all_that_it_started(site: Site, short: Path) -> None:
    info = await site.up()
    assert (info.state, info.nodes, info.address.partition(":")[0]) == ("ready", 3, "127.0.0.2")
    pids = belonging()
    assert len(pids) == 9  # a keeper, its Ray and a child of that in a session of its own, of three nodes
    assert (await site.status()).state == "ready"

    await site.up()
    assert [line for line in site.said if "runs already" in line] == site.said
    assert belonging() == pids

    done = await site.down()
    assert [line.split()[1] for line in done] == ["worker-0", "worker-1", "head"]
    assert gone(pids)
    assert list(short.iterdir()) == []
    assert (await site.status()).state == "absent"
    assert await site.down() == []


async def test_the_token_is_private_and_in_no_argument(site: Site) -> None:
    await site.up()
    token = token_path("mvp").read_text()
    assert len(token) == 64
    assert token_path("mvp").stat().st_mode & 0o777 == 0o600
    assert not alive_with(token)
    assert token not in "".join(site.said)
    texts = [path.read_text() for path in token_path("mvp").parent.rglob("*") if path.is_file()]
    assert sum(token in text for text in texts) == 1
    address = "http://127.0.0.1:8265"
    assert site.launcher().own_token(address) == f"file:{token_path('mvp')}"
    assert site.launcher().own_token("http://10.0.0.1:8265") is None


async def test_a_half_up_cluster_is_completed(site: Site, tmp_path: Path) -> None:
    fails = double_python(tmp_path, FAIL="worker-1")
    with pytest.raises(LauncherError) as failed:
        await site.up(python=fails)
    text = str(failed.value)
    assert "lacks worker-1; head, worker-0 are up and kept" in text
    assert "the object store is too small" in text
    assert (await site.status(python=fails)).state == "degraded"
    Path(fails).write_text(Path(site.keys["python"]).read_text())  # mended
    kept = {
        name: state["keeper"]
        for name, state in clusters_node.read_states("mvp").items()
        if name != "worker-1"
    }
    assert (await site.up(python=fails)).state == "ready"
    now = clusters_node.read_states("mvp")
    assert {name: now[name]["keeper"] for name in kept} == kept
    await site.down(python=fails)


async def test_a_node_that_never_joins_is_named_with_its_log(site: Site, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"(?s)lacks worker-0;.*has not joined.*Double of node worker-0"):
        await site.up(python=double_python(tmp_path, MUTE="worker-0"), timeout=4)
    assert any("waiting for worker-0" in line for line in site.said)


_BRING_UP = """
import asyncio, json, sys
from pathlib import Path
from rollhook.launcher import ClusterOptions
from rollhook.testing.environment import build_context
from rollhook_ray import RayLauncherConfig
from rollhook_ray.launcher import RayLauncher
launcher = RayLauncher(RayLauncherConfig(cluster=json.loads(sys.argv[1])), build_context(Path(sys.argv[2])))
asyncio.run(launcher.cluster_up([], ClusterOptions(), print))
"""


@pytest.mark.parametrize("node", ["head", "worker-0"])
async def test_kill_9_half_way_leaves_what_down_ends_and_up_completes(
    site: Site, short: Path, tmp_path: Path, node: str
) -> None:
    site.keys["python"] = double_python(tmp_path, HELD=node)
    argv = [sys.executable, "-c", _BRING_UP, json.dumps(site.keys), str(tmp_path)]
    bringing = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    until(lambda: "keeper" in clusters_node.read_states("mvp").get(node, {}))
    bringing.kill()
    bringing.wait()
    assert record_path("mvp").exists()
    if node == "worker-0":
        pids = belonging()
        assert len(await site.down()) == 2
        assert gone(pids)
        return
    let_go(short)
    await site.up()
    assert sum("runs already" in line for line in site.said) == 1
    pids = belonging()
    await site.down()
    assert gone(pids)


async def test_a_killed_keeper_leaves_nothing_that_down_does_not_end(site: Site) -> None:
    await site.up()
    pids = belonging()
    keeper = clusters_node.read_states("mvp")["worker-0"]["keeper"]["pid"]
    os.kill(keeper, signal.SIGKILL)
    until(lambda: clusters_node.process(keeper) is None)
    assert (await site.status()).state == "degraded"
    await site.down()
    orphan = {p for p in pids if clusters_node.process(p)}
    # only what had cut every tie, its environment too, is beyond a killed keeper's reach
    assert len(orphan) <= 1
    for pid in orphan:
        os.kill(pid, signal.SIGKILL)


async def test_a_node_that_ran_into_rays_own_limit_is_started_once_more(site: Site, tmp_path: Path) -> None:
    python = double_python(tmp_path, LATE="head")
    assert (await site.up(python=python)).state == "ready"
    assert "head: Ray gave its start 30 s, which was too short; once more" in site.said
    await site.down(python=python)


async def test_without_waiting_it_returns_once_all_are_started(
    site: Site, short: Path, tmp_path: Path
) -> None:
    python = double_python(tmp_path, HELD="worker-1")
    assert (await site.up(wait=False, python=python)).state == "pending"
    assert site.said[-1].startswith("worker-1: started after")
    assert (await site.status(python=python)).state == "degraded"
    let_go(short)
    assert (await site.up(python=python)).state == "ready"
    await site.down(python=python)


async def test_a_stubborn_node_is_killed(site: Site, tmp_path: Path) -> None:
    python = double_python(tmp_path, STUBBORN="worker-1")
    await site.up(python=python)
    pids = belonging()
    await site.down(python=python)
    assert gone(pids)


async def test_a_process_that_has_got_the_pid_is_let_be(site: Site) -> None:
    await site.up()
    path = Path(clusters_node.state_file("mvp", "worker-0"))
    state = json.loads(path.read_text())
    stranger = subprocess.Popen(["sleep", "100"])
    with contextlib.ExitStack() as stack:
        stack.callback(stranger.wait)
        stack.callback(stranger.kill)
        keeper = clusters_node.process(state["keeper"]["pid"])
        assert keeper is not None
        clusters_node.end([keeper], 5.0)
        ticks = state["keeper"]["ticks"]
        path.write_text(json.dumps(state | {"keeper": state["keeper"] | {"pid": stranger.pid}}))
        assert (await site.status()).state == "degraded"
        assert (await site.up()).state == "ready"
        assert clusters_node.read_states("mvp")["worker-0"]["keeper"]["ticks"] > ticks
        path.write_text(json.dumps(state | {"keeper": state["keeper"] | {"pid": stranger.pid}}))
        await site.down()
        assert stranger.poll() is None


@pytest.mark.parametrize("temp_root", ["", "/", "../..", "precious"])
@pytest.mark.parametrize("nonce", ["", "..", "/../../precious", "0123456789abcdef"])
def test_only_a_directory_of_the_clusters_own_nonce_is_removed(
    short: Path, monkeypatch: pytest.MonkeyPatch, temp_root: str, nonce: str
) -> None:
    monkeypatch.chdir(short)
    (short / "precious").mkdir()
    (short / "precious" / "file").write_text("x")
    (short / "rh-fedcba9876").mkdir()
    link = short / "rh-0123456789"
    link.symlink_to(short / "precious")
    state = {"cluster": "mvp", "node": "head", "nonce": nonce, "stop_seconds": 1.0, "temp": str(short)}
    before = sorted(short.rglob("*"))
    for root in (temp_root, str(short / temp_root), str(short)):
        clusters_node.end_node(state | {"temp_root": root})
    assert sorted(short.rglob("*")) == before


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"node": "head"}', '{"schema": 2, "node": "head"}'])
def test_a_nodes_file_that_cannot_be_read_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = Path(clusters_node.state_file("mvp", "head"))
    path.write_text(text)
    request = {"cluster": "mvp", "nonce": "n", "ports": [], "addresses": [], "temp_root": "/tmp", "old": None}
    assert clusters_host.probe(request)["nodes"] == {}
    assert clusters_host.stop({"cluster": "mvp", "nonce": "n", "nodes": ["head"]}) == []
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2, "new": 1}, "upgrade rollhook"),
        ({"keys": {"bad": 1}}, "cannot be read"),
        ({"hosts": ["-oProxyCommand=true"]}, "is no record of cluster mvp"),
        ({"name": "../other"}, "is no record of cluster mvp"),
        ({"nonce": 5}, "is no record of cluster mvp"),
    ],
)
def test_a_clusters_record_that_is_not_this_versions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_record(new_record(ClusterKeys(name="mvp")))
    path = record_path("mvp")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RollhookError, match=message):
        read_record("mvp")


async def test_nodes_of_another_machine_with_the_same_home_are_let_be(site: Site) -> None:
    await site.up()
    path = Path(clusters_node.state_file("mvp", "worker-1"))
    state = json.loads(path.read_text())
    keeper = clusters_node.keeper_of(state)
    assert keeper is not None
    other = {"machine": "gpu-7/0123", "keeper": state["keeper"] | {"boot": "another"}}
    path.write_text(json.dumps(state | other))
    assert (await site.status()).message == "worker-1 is missing"
    assert [line.split()[1] for line in await site.down()] == ["worker-0", "head"]
    assert path.exists()
    assert clusters_node.process(keeper.pid) == keeper
    path.write_text(json.dumps(state))


async def test_changed_keys_are_told_and_recreate_replaces_what_differs(site: Site) -> None:
    await site.up()
    head = clusters_node.read_states("mvp")["head"]["keeper"]
    changed = {"worker_resources": {"worker_node": 7}}
    with pytest.raises(LauncherError, match=r"worker-0 runs with other keys.*worker-1.*--recreate"):
        await site.up(**changed)
    with pytest.raises(LauncherError, match=r"worker-1 runs where the recipe does not have it any more"):
        await site.up(workers=1)
    await site.up(recreate=True, workers=1, **changed)
    states = clusters_node.read_states("mvp")
    assert sorted(states) == ["head", "worker-0"]
    assert states["head"]["keeper"] == head
    assert '--resources={"worker_node": 7.0}' in states["worker-0"]["argv"]
    await site.down()


async def test_a_taken_port_is_told_with_its_holder_and_key(site: Site) -> None:
    port = site.keys["ports"]["node"] + 2
    argv = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    holder = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: port in listening())
        with pytest.raises(LauncherError) as told:
            await site.up()
        assert f"port {port} of head is taken by process {holder.pid}" in str(told.value)
        assert "launcher.cluster.ports.node" in str(told.value)
        assert clusters_node.read_states("mvp") == {}
    finally:
        holder.kill()
        holder.wait()


async def test_two_at_once_do_not_race(site: Site, short: Path, tmp_path: Path) -> None:
    site.keys["python"] = double_python(tmp_path, HELD="head")
    first = asyncio.ensure_future(site.launcher().cluster_up([], ClusterOptions(), lambda line: None))
    while "head" not in clusters_node.read_states("mvp"):
        await asyncio.sleep(0.02)
    with pytest.raises(LauncherError, match="another `rollhook cluster up` or `down` of mvp is at work"):
        await site.up()
    let_go(short)
    await first
    await site.down()


async def test_the_list_names_clusters_of_this_machine_and_of_others(site: Site) -> None:
    await site.up()
    (info,) = await site.launcher().clusters()
    assert (info.name, info.state) == ("mvp", "ready")
    record = record_path("mvp").read_text()
    record_path("mvp").unlink()
    (info,) = await site.launcher().clusters()
    assert info.state == "unknown"
    assert "head, worker-0, worker-1; brought up by" in info.message
    record_path("mvp").write_text(record)
    await site.down()


async def test_an_old_cluster_is_named_and_removed_only_on_confirmation(site: Site) -> None:
    await site.up()
    pids = belonging()
    record_path("mvp").unlink()  # as if it had been brought up from a machine that is no more
    with pytest.raises(LauncherError, match=r"also called mvp, brought up by .*cluster down --old"):
        await site.up()
    asked: list[str] = []

    def answer(yes: bool) -> ClusterOptions:
        return ClusterOptions(old=True, confirm=lambda question: asked.append(question) or yes)  # type: ignore[func-returns-value]

    done = await site.launcher().cluster_down([], answer(False), site.said.append)
    assert done == ["this older deployment kept"]
    assert not gone(pids)
    assert any(
        "older deployment on this machine: cluster mvp (head, worker-0, worker-1)" in x for x in site.said
    )
    done = await site.launcher().cluster_down([], answer(True), site.said.append)
    assert [each.partition(",")[0] for each in done] == ["removed on this machine: cluster mvp (head"]
    assert asked == ["Remove this older deployment?"] * 2
    assert gone(pids)


async def test_old_containers_are_found_by_name_and_removed(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a double of the docker program: what it prints is its documented form, what is removed it writes down
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin" / "docker"
    rows = "c1\\tmvp-ray-head\\tray:v1\\tUp 3 days\\nc2\\tpostgres\\tpg:15\\tUp 3 days\\n"
    docker.write_text(
        f'#!/bin/sh\nif [ "$1" = ps ]; then printf "{rows}"; else echo "$@" >> {tmp_path}/calls; fi\n'
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    options = ClusterOptions(old=True, confirm=lambda question: True)
    done = await site.launcher(old_containers=["mvp-ray-*"]).cluster_down([], options, site.said.append)
    assert done == ["removed on this machine: container mvp-ray-head of ray:v1 (Up 3 days)"]
    assert (tmp_path / "calls").read_text() == "rm --force c1\n"


async def test_over_ssh_it_comes_up_is_kept_and_ends(hosts: Site, server: Sshd) -> None:
    info = await hosts.up()
    assert (info.state, info.nodes) == ("ready", 3)
    pids = belonging()
    argv = [clusters_node.arguments(pid) for pid in pids]
    token = token_path("mvp").read_text()
    assert not any(token in each for arguments in argv for each in arguments)
    # nothing of it hangs on a connection
    assert not set(pids) & clusters_node.below([server.pid], clusters_node.processes())
    async with hosts.launcher().dashboard(None, 0) as url:
        assert url.startswith("http://127.0.0.1:")
        assert await asyncio.to_thread(_get, url, token) == 200
        assert await asyncio.to_thread(_get, url, "wrong") == 401
    status = await hosts.status()
    assert [node["host"] for node in status.raw["nodes"]] == list(ADDRESSES)
    done = await hosts.down()
    assert len(done) == 3
    assert gone(pids)


def _get(url: str, token: str) -> int:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


async def test_all_that_is_wrong_with_hosts_is_told_at_once_and_nothing_is_started(
    hosts: Site, server: Sshd
) -> None:
    wrong = [
        "127.0.0.2",
        {"host": "127.0.0.3", "address": "203.0.113.7"},
        {"host": "127.0.0.4", "python": "/usr/bin/no-python"},
        "127.0.0.9",
        "no-such-host.invalid",
    ]
    wrong[4] = {"host": "no-such-host.invalid", "address": "127.0.0.5"}
    with pytest.raises(LauncherError) as told:
        await hosts.up(hosts=wrong)
    lines = str(told.value).splitlines()
    assert "nothing was started" in lines[0]
    for host, what in {
        "127.0.0.3": "203.0.113.7 of worker-0 is not an address of it",
        "127.0.0.4": "/usr/bin/no-python cannot be run there",
        "127.0.0.9": "ssh cannot reach it",
        "no-such-host.invalid": "its name cannot be resolved",
    }.items():
        assert [line for line in lines if line.startswith(f"- host {host}: ") and what in line], (host, lines)
    assert clusters_node.read_states("mvp") == {}
    assert not record_path("mvp").exists()


async def test_a_key_that_is_not_accepted_and_an_unknown_host_key_are_told(hosts: Site, server: Sshd) -> None:
    ssh = server.keys() | {"options": [f"IdentityFile={server.other_key}", "IdentityAgent=none"]}
    text = server.config.read_text()
    only_other = server.config.with_name("other_config")
    only_other.write_text(text.replace(f"{server.config.parent}/user\n", f"{server.other_key}\n"))
    with pytest.raises(LauncherError, match=r"Permission denied .*no key that ssh offers is accepted"):
        await hosts.up(ssh=ssh | {"config": str(only_other)})
    unknown = server.keys() | {"options": ["UserKnownHostsFile=/dev/null"]}
    with pytest.raises(LauncherError, match=r"Host key verification failed.*connect once by hand"):
        await hosts.up(ssh=unknown)
    with pytest.raises(LauncherError, match=r"Can't open user config file.*launcher\.cluster\.ssh\.config"):
        await hosts.up(ssh={"config": "/no/such/file"})


async def test_a_host_without_ray_is_told_and_install_puts_the_pinned_packages_there(
    hosts: Site, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", bare], check=True)
    python = str(bare / "bin" / "python")
    mixed = [{"host": "127.0.0.2", "python": python}, *ADDRESSES[1:]]
    with pytest.raises(LauncherError, match=rf"host 127.0.0.2: {python} has no Ray; .*--install"):
        await hosts.up(hosts=mixed)
    # a package that calls itself ray, in two versions of which the constraints allow the older
    for version in ("2.51.0", "2.52.0"):
        _wheel(tmp_path, version)
    (tmp_path / "constraints.txt").write_text("ray==2.51.0\n")
    install = {
        "packages": ["ray"],
        "constraints": str(tmp_path / "constraints.txt"),
        "options": ["--no-index", "--find-links", str(tmp_path)],
    }
    await _installed(hosts, python, install)
    shown = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert [line.split() for line in shown.splitlines() if line.startswith("ray")] == [["ray", "2.51.0"]]
    assert len([line for line in hosts.said if line.startswith("installing ray on 127.0.0.")]) == 1
    assert any("Successfully installed ray-2.51.0" in line for line in hosts.said)
    with pytest.raises(
        LauncherError, match=r"host 127.0.0.3: it has Ray .* and the head has Ray 2.51.0 and "
    ):
        await hosts.up(hosts=mixed)


async def _installed(hosts: Site, python: str, install: dict[str, Any]) -> None:
    """Install; the package is no Ray, so that what follows fails, and says so by its log."""
    hosts.keys |= {"install": install, "hosts": [{"host": each, "python": python} for each in ADDRESSES[:2]]}
    with pytest.raises(LauncherError, match=r"(?s)head on 127.0.0.2: Ray ended as it started.*'ray'"):
        await hosts.up(install=True)


def _wheel(directory: Path, version: str) -> None:
    import zipfile

    with zipfile.ZipFile(directory / f"ray-{version}-py3-none-any.whl", "w") as wheel:
        info = f"ray-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: ray\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


async def test_a_host_that_is_away_is_named_by_down_and_keeps_its_record(hosts: Site, server: Sshd) -> None:
    await hosts.up()
    pids = belonging()
    away = server.config.with_name("away_config")
    text = server.config.read_text()
    away.write_text("Host 127.0.0.4\nPort 1\n" + text)
    record = json.loads(record_path("mvp").read_text())
    record["keys"]["ssh"]["config"] = str(away)
    record_path("mvp").write_text(json.dumps(record))
    with pytest.raises(
        LauncherError, match=r"not all of cluster mvp was ended .*host 127.0.0.4: ssh cannot reach"
    ):
        await hosts.down()
    assert record_path("mvp").exists()
    record["keys"]["ssh"]["config"] = str(server.config)
    record_path("mvp").write_text(json.dumps(record))
    await hosts.down()
    assert gone(pids)


def test_targets_and_what_is_only_rendered(site: Site) -> None:
    assert site.launcher().cluster_targets() == ["mvp"]
    with pytest.raises(UsageError, match=r"no target other; the recipe's cluster is mvp"):
        site.launcher().cluster_plan(["other"])
    with pytest.raises(Unsupported, match=r"docker-compose project is rendered"):
        asyncio.run(site.up(by="compose"))
