"""What an image, a Dockerfile and a size come down to, and how often it is built."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.errors import SandboxError
from rollhook.sandbox import SandboxSpec
from rollhook_e2b import E2BConfig
from rollhook_e2b.templates import Plan, Recorder, Step, fill, plan_for

CONFIG = E2BConfig()
DOCKERFILE = """\
FROM debian:12
# a remark
ENV GREETING=hello
WORKDIR /srv/app
COPY app/ /srv/app/
RUN whoami > /who && echo $GREETING > /greeting
USER nobody
RUN id -un > /tmp/later
CMD ["bash"]
"""


@pytest.fixture(scope="module")
def parse() -> Callable[[str, Any], str]:
    pytest.importorskip("e2b", reason="needs e2b (pip install 'e2b>=2.53,<3')")
    from e2b.template.dockerfile_parser import parse_dockerfile

    parser: Callable[[str, Any], str] = parse_dockerfile
    return parser


def no_parser(text: str, builder: Any) -> str:
    raise AssertionError("no Dockerfile here")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "context/app/sub").mkdir(parents=True)
    (tmp_path / "context/app/main.py").write_text("print('hi')\n")
    (tmp_path / "context/app/sub/data").write_bytes(b"\0\xff")
    (tmp_path / "context/app/link").symlink_to("main.py")
    (tmp_path / "context/elsewhere").write_text("not copied")
    return tmp_path / "context"


def alias(plan: Plan | None) -> str:
    assert plan is not None
    return plan.alias("rollhook")


def test_the_name_follows_from_all_that_a_template_is_made_of() -> None:
    """Row 90: it changes with the base, the user, commands, files and size; it is stable otherwise."""
    plan = Plan("debian:12", False, (Step("USER", ("root",)), Step("RUN", ("true", ""))), 2, 1024)
    others = [
        replace(plan, base="debian:11"),
        replace(plan, from_template=True),
        replace(plan, steps=(Step("USER", ("user",)), *plan.steps[1:])),
        replace(plan, steps=(*plan.steps, Step("RUN", ("false", "")))),
        replace(plan, steps=(plan.steps[0], Step("RUN", ("true", "user")))),
        replace(plan, cpus=1),
        replace(plan, memory_mib=2048),
        replace(plan, files=(("a", 0o644, "0" * 64),)),
    ]
    names = {each.alias("rollhook") for each in (plan, *others)}
    assert len(names) == len(others) + 1
    assert plan.alias("rollhook") == "rollhook-d4a9fe10cee1", "a changed hash builds every template anew"
    assert replace(plan, context="/elsewhere", user="nobody").alias("rollhook") == plan.alias("rollhook")
    assert all(len(name) == len("rollhook-") + 12 for name in names)


@given(
    st.lists(st.tuples(st.sampled_from(["RUN", "ENV", "USER"]), st.lists(st.text(), max_size=3)), max_size=4),
    st.lists(st.tuples(st.sampled_from(["RUN", "ENV", "USER"]), st.lists(st.text(), max_size=3)), max_size=4),
)
def test_different_steps_have_different_names(one: list[Any], other: list[Any]) -> None:
    plans = [
        Plan("b", False, tuple(Step(kind, tuple(args)) for kind, args in steps), None, None)
        for steps in (one, other)
    ]
    assert (plans[0].alias("p") == plans[1].alias("p")) == (one == other)


def test_a_dockerfile_becomes_steps(parse: Any, context: Path) -> None:
    spec = SandboxSpec(dockerfile=DOCKERFILE, context_dir=str(context), cpus=1.5, memory_bytes=700 << 20)
    plan = plan_for(spec, CONFIG, parse)
    assert plan is not None
    assert plan.base == "debian:12"
    assert plan.steps[:2] == (Step("USER", ("root",)), Step("WORKDIR", ("/",))), "row 91: root comes first"
    assert [step.kind for step in plan.steps[2:]] == ["ENV", "WORKDIR", "COPY", "RUN", "USER", "RUN"]
    assert (plan.cpus, plan.memory_mib, plan.user) == (2, 700, "nobody")
    assert [name for name, _, _ in plan.files] == [
        "app",
        "app/link",
        "app/main.py",
        "app/sub",
        "app/sub/data",
    ]


@pytest.mark.parametrize("source", ["way/out/secret", "way/out/sec*", "way/../way/out/secret"])
def test_a_link_does_not_lead_out_of_the_context(parse: Any, context: Path, source: str) -> None:
    (context.parent / "secret").write_text("of the host")
    (context / "way").mkdir()
    (context / "way/out").symlink_to("../..")
    spec = SandboxSpec(dockerfile=f"FROM debian:12\nCOPY {source} /x\n", context_dir=str(context))
    with pytest.raises(SandboxError, match="lies outside the build context"):
        plan_for(spec, CONFIG, parse)
    all_of_it = plan_for(replace(spec, dockerfile="FROM debian:12\nCOPY . /x\n"), CONFIG, parse)
    assert all_of_it is not None
    assert "way/out" in [name for name, _, _ in all_of_it.files], "a link is copied as one"


def test_what_is_no_part_of_the_recipe_does_not_change_the_name(parse: Any, context: Path) -> None:
    def name(text: str = DOCKERFILE) -> str:
        spec = SandboxSpec(dockerfile=text, context_dir=str(context), labels={"a": "b"}, workdir="/w")
        return alias(plan_for(spec, CONFIG, parse))

    first = name()
    (context / "elsewhere").write_text("changed")
    assert name(DOCKERFILE.replace("# a remark", "# another")) == first
    (context / "app/sub/data").write_bytes(b"\0\xfe")
    second = name()
    assert second != first
    (context / "app/main.py").chmod(0o755)
    third = name()
    (context / "app/link").unlink()
    (context / "app/link").symlink_to("sub/data")
    assert len({first, second, third, name()}) == 4


def test_a_base_without_a_user_leaves_root(parse: Any) -> None:
    plan = plan_for(SandboxSpec(dockerfile="FROM debian:12\nRUN true"), CONFIG, parse)
    assert plan is not None
    assert plan.user is None
    assert [step.kind for step in plan.steps] == ["USER", "WORKDIR", "RUN"]
    named = plan_for(SandboxSpec(dockerfile="FROM debian:12\nUSER user\n"), CONFIG, parse)
    assert named is not None
    assert named.user == "user"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"dockerfile": "FROM a\nFROM b\n"}, "[Mm]ulti-stage"),
        ({"dockerfile": "RUN true\n"}, "FROM"),
        ({"dockerfile": "FROM debian:12\nCOPY app /app\n"}, "no build context"),
        ({"dockerfile": "FROM debian:12\nCOPY absent /app\n", "context_dir": "."}, "has no absent"),
        ({"dockerfile": "FROM debian:12\nCOPY ../app /app\n", "context_dir": "."}, "outside|has no"),
    ],
)
def test_a_dockerfile_that_cannot_be_built_is_the_users(
    parse: Any, context: Path, spec: dict[str, Any], said: str
) -> None:
    if "context_dir" in spec:
        spec = {**spec, "context_dir": str(context / "app" / "sub")}
    with pytest.raises(SandboxError, match=said) as raised:
        plan_for(SandboxSpec(**spec), CONFIG, parse)
    assert raised.value.kind == "user"


def test_sizes_are_at_least_what_is_asked() -> None:
    assert plan_for(SandboxSpec(), CONFIG, no_parser) is None
    small = plan_for(SandboxSpec(memory_bytes=64 << 20, cpus=0.5), CONFIG, no_parser)
    assert small is not None
    assert (small.base, small.from_template, small.cpus, small.memory_mib) == ("base", True, 1, 512)
    odd = plan_for(SandboxSpec(image="python:3", memory_bytes=(1023 << 20) + 1), CONFIG, no_parser)
    assert odd is not None
    assert (odd.base, odd.from_template, odd.cpus, odd.memory_mib) == ("python:3", False, None, 1024)
    configured = plan_for(SandboxSpec(), E2BConfig(cpus=4, memory_mib=2048), no_parser)
    assert configured is not None
    assert (configured.cpus, configured.memory_mib) == (4, 2048)


def test_steps_go_into_the_builder_in_their_order() -> None:
    """Row 91 again, at the builder: the user is set before any command."""
    recorder = Recorder()
    builder = type("B", (), {"from_image": lambda self, base: recorder})()
    steps = (
        Step("USER", ("root",)),
        Step("ENV", ("A", "b")),
        Step("RUN", ("true", "")),
        Step("COPY", ("a", "/b", "me", "755")),
    )
    fill(builder, Plan("debian:12", False, steps, None, None))
    assert tuple(recorder.steps) == steps


# against the double


def builds(double: Any) -> int:
    return int(double.counts().get("e2b_builds", 0))


async def test_a_template_is_built_once_and_found_again(make_e2b: Any, double: Any, context: Path) -> None:
    before = builds(double)
    spec = SandboxSpec(dockerfile=DOCKERFILE, context_dir=str(context))
    first, second = make_e2b(), make_e2b()
    name = await first.bake(spec)
    assert await first.bake(spec) == name
    raw = await first.create(spec)
    assert await raw.read("/who", limit=100) == b"root\n"
    assert await raw.read("/greeting", limit=100) == b"hello\n"
    assert await raw.read("/tmp/later", limit=100) == b"nobody\n"
    assert await raw.read("/srv/app/sub/data", limit=100) == b"\0\xff"
    assert raw.spec.user == "nobody"
    assert await second.bake(spec) == name, "another process finds it by its name"
    await first.delete(raw.id)
    await first.aclose()
    await second.aclose()
    assert builds(double) - before == 1


async def test_sixteen_that_ask_at_once_build_once(make_e2b: Any, double: Any) -> None:
    """Row 92."""
    before = builds(double)
    backend, other = make_e2b(), make_e2b()
    spec = SandboxSpec(image="debian:12", memory_bytes=1 << 30)
    names = await asyncio.gather(*(each.bake(spec) for each in [backend] * 8 + [other] * 8))
    assert len(set(names)) == 1
    assert builds(double) - before == 1
    await backend.aclose()
    await other.aclose()


OTHER = """
import asyncio, json, logging, sys
from pathlib import Path
from rollhook.component import BuildContext
from rollhook.sandbox import SandboxSpec
from rollhook_e2b import E2BConfig
from rollhook_e2b.backend import E2BSandboxes

async def main():
    keys, key, cache, spec = json.loads(sys.argv[1])
    context = BuildContext(logging.getLogger("o"), Path(cache), Path(cache), secret=lambda reference: key)
    backend = E2BSandboxes(E2BConfig.model_validate(keys), context)
    print(await backend.bake(SandboxSpec(**spec)))
    await backend.aclose()

asyncio.run(main())
"""


async def test_processes_of_a_host_build_once(double: Any, tmp_path: Path) -> None:
    before = builds(double)
    double.fault(surface="e2b_api", method="POST", path="/v3/templates", delay_before=0.5)
    keys = {"api_url": double.url("e2b_api"), "sandbox_url": double.url("e2b_envd")}
    spec = {"dockerfile": "FROM debian:12\nRUN echo processes > /p\n"}
    said = json.dumps([keys, double.key, str(tmp_path), spec])
    argv = [sys.executable, "-c", OTHER, said]
    running = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    names = await asyncio.gather(*(asyncio.to_thread(process.communicate) for process in running))
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len({out for out, _ in names}) == 1
    assert builds(double) - before == 1


async def test_of_builders_on_two_hosts_one_is_superseded_and_both_go_on(
    make_e2b: Any, double: Any, tmp_path: Path
) -> None:
    before = builds(double)
    first, second = make_e2b(), make_e2b()
    await first.start()
    await second.start()
    assert second._builds is not None
    second._builds._directory = tmp_path / "another-host"
    spec = SandboxSpec(dockerfile="FROM debian:12\nRUN sleep 2; echo hosts > /h\n")
    asked = asyncio.create_task(first.bake(spec))
    async with asyncio.timeout(20):
        while builds(double) == before:
            await asyncio.sleep(0.02)
    names = await asyncio.gather(asked, second.bake(spec))
    assert names[0] == names[1]
    assert builds(double) - before == 2
    raw = await first.create(spec)
    assert await raw.read("/h", limit=10) == b"hosts\n"
    await first.delete(raw.id)
    await first.aclose()
    await second.aclose()


async def test_a_build_that_fails_shows_the_end_of_its_log_and_is_not_repeated(
    make_e2b: Any, double: Any
) -> None:
    before = builds(double)
    backend = make_e2b()
    spec = SandboxSpec(dockerfile="FROM debian:12\nRUN echo the reason is this; exit 7\n")
    for _ in range(2):
        with pytest.raises(SandboxError, match="the reason is this") as raised:
            await backend.create(spec)
        assert raised.value.kind == "user"
        assert not backend.retryable(raised.value)
        assert "exit code: 7" in str(raised.value)
    assert builds(double) - before == 1
    await backend.aclose()


async def test_a_build_takes_no_longer_than_its_limit(make_e2b: Any) -> None:
    backend = make_e2b()
    spec = SandboxSpec(dockerfile="FROM debian:12\nRUN sleep 60\n", build_seconds=0.6)
    async with asyncio.timeout(20):
        with pytest.raises(SandboxError, match="build_seconds"):
            await backend.bake(spec)
    await backend.aclose()


async def test_a_template_that_somebody_deleted_is_built_anew(make_e2b: Any, double: Any) -> None:
    import urllib.request

    backend = make_e2b()
    spec = SandboxSpec(dockerfile="FROM debian:12\nRUN echo deleted > /d\n")
    name = await backend.bake(spec)
    request = urllib.request.Request(f"{double.url('e2b_api')}/templates/{name}", method="DELETE")
    request.add_header("X-API-KEY", double.key)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10):
        pass
    raw = await backend.create(spec)
    assert await raw.read("/d", limit=10) == b"deleted\n"
    await backend.delete(raw.id)
    await backend.aclose()


async def test_a_caller_that_gives_up_leaves_the_build_to_the_next(make_e2b: Any, double: Any) -> None:
    before = builds(double)
    backend = make_e2b()
    spec = SandboxSpec(dockerfile="FROM debian:12\nRUN sleep 0.7\n")
    asked = asyncio.create_task(backend.bake(spec))
    async with asyncio.timeout(20):
        while builds(double) == before:
            await asyncio.sleep(0.02)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert (await backend.bake(spec)).startswith("rollhook-")
    assert builds(double) - before == 1
    await backend.aclose()


async def test_an_images_own_path_reaches_commands(make_e2b: Any) -> None:
    """A login shell sets PATH anew; what the template said is put back."""
    backend = make_e2b()
    spec = SandboxSpec(dockerfile='FROM debian:12\nENV PATH=/opt/tool:$PATH\nENV SPOKEN="a b"\n')
    raw = await backend.create(spec)
    process = await raw.start(["sh", "-c", 'echo "$PATH|$SPOKEN"'])
    said = b"".join([chunk async for chunk in process.stdout()]).decode()
    assert said.startswith("/opt/tool:/")
    assert said.endswith("|a b\n")
    await backend.delete(raw.id)
    await backend.aclose()
