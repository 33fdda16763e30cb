"""`rollhook dev`: a pod to work in, beside the clusters."""

from __future__ import annotations

import asyncio
import getpass
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollhook.errors import UsageError

if TYPE_CHECKING:
    from rollhook_kuberay.site import Site

app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="A pod to work in, beside the clusters.",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

Recipe = Annotated[
    str | None,
    typer.Argument(
        help="recipe whose launcher section gives image, namespace and mounts", show_default=False
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value", show_default=False)]
Image = Annotated[str | None, typer.Option(help="image of the pod; default: the recipe's")]
Namespace = Annotated[str | None, typer.Option("-n", "--namespace", help="default: the kubeconfig's")]


@app.command()
def connect(
    recipe: Recipe = None,
    overrides: Overrides = None,
    image: Image = None,
    namespace: Namespace = None,
    command: Annotated[
        str | None, typer.Option("-c", "--command", help="run this there instead of a shell, and end")
    ] = None,
) -> None:
    """Make the pod if it is not there, and open a shell in it. The pod stays until `rollhook dev stop`."""
    site = _site(recipe, overrides, image, namespace)

    async def work() -> int:
        from rollhook_kuberay import dev_pod, terminal

        async with site.port() as port:
            name = await dev_pod.connect(site, port, _say)
            if command is not None:
                done = await port.exec(name, ["bash", "-c", command])
                sys.stdout.buffer.write(done.stdout)
                sys.stderr.buffer.write(done.stderr)
                return done.exit_code
            if not sys.stdin.isatty():
                _say(f"{name} runs; there is no terminal here to open a shell on: use --command")
                return 0
            code = await terminal.shell(port, name, ["bash", "-l"])
            _say(f"{name} goes on; `rollhook dev stop` ends it")
            return code

    raise typer.Exit(_run(work()))


@app.command()
def stop(recipe: Recipe = None, overrides: Overrides = None, namespace: Namespace = None) -> None:
    """Delete the pod."""
    site = _site(recipe, overrides, "none", namespace)

    async def work() -> int:
        from rollhook_kuberay import dev_pod

        name = dev_pod.pod_name(site.user)
        async with site.port() as port:
            gone = await port.delete("Pod", name)
        _say(f"{name} was deleted" if gone else f"there is no {name}")
        return 0

    raise typer.Exit(_run(work()))


@app.command("setup-secrets")
def setup_secrets(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="NAME (asked for, or a line of stdin), NAME=env:VARIABLE or NAME=file:PATH"),
    ] = None,
    ssh_key: Annotated[Path | None, typer.Option(help="private key that the pod puts into ~/.ssh")] = None,
    rclone: Annotated[Path | None, typer.Option(help="rclone.conf that the pod puts in its place")] = None,
    namespace: Namespace = None,
) -> None:
    """Put secrets into your Secret, `<user>-secrets`; no value is ever an argument, or shown."""
    from rollhook_kuberay import dev_pod

    values = {dev_pod.secret_key(name): value for name, value in map(_value, names or [])}
    if ssh_key is not None:
        values[dev_pod.secret_key(f"ssh-{ssh_key.name}")] = _file(ssh_key)
    if rclone is not None:
        values["rclone.conf"] = _file(rclone)
    if not values:
        raise UsageError("say which secrets: NAME, NAME=env:VARIABLE, NAME=file:PATH, --ssh-key or --rclone")
    site = _site(None, None, "none", namespace)

    async def work() -> int:
        async with site.port() as port:
            name = await dev_pod.store_secrets(port, site.user, values)
            _say(f"the Secret {name} in {port.namespace} has {', '.join(values)} now")
        return 0

    raise typer.Exit(_run(work()))


def _value(text: str) -> tuple[str, bytes]:
    from rollhook.secrets import Secret

    name, equals, reference = text.partition("=")
    if equals:
        try:
            secret = Secret.parse(reference)
        except ValueError:
            raise UsageError(
                f"{name}=... holds no reference, and values stay out of the command line: write {name} "
                "alone and give the value on stdin, or env:VARIABLE or file:PATH"
            ) from None
        return name, secret.resolve().get_secret_value().encode()
    given = getpass.getpass(f"{name}: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\r\n")
    if not given:
        raise UsageError(f"no value was given for {name}")
    return name, given.encode()


def _file(path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _site(recipe: str | None, overrides: list[str] | None, image: str | None, namespace: str | None) -> Site:
    from pydantic import ValidationError

    from rollhook.secrets import resolve_secret
    from rollhook_kuberay.config import KubeRayLauncherConfig
    from rollhook_kuberay.site import Site

    keys: dict[str, Any] = {}
    if recipe is not None:
        from rollhook.recipe.load import load_recipe

        use = load_recipe(recipe, overrides or []).recipe.launcher
        if use.use != "kuberay":
            raise UsageError(
                f"the recipe's launcher is {use.use}; add launcher.use=kuberay, or name no recipe"
            )
        keys = dict(use.keys)
    keys |= {name: value for name, value in (("image", image), ("namespace", namespace)) if value is not None}
    if "image" not in keys:
        raise UsageError("say which image the pod has: --image, or a recipe with launcher kuberay")
    try:
        return Site(KubeRayLauncherConfig.model_validate(keys), resolve_secret)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"launcher.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _run(work: Coroutine[Any, Any, int]) -> int:
    return asyncio.run(work)


def _say(line: str) -> None:
    typer.echo(line, err=True)
