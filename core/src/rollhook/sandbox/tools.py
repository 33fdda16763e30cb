"""A sandbox as tools: exec, read, write and view."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollhook.errors import SandboxDead, SandboxError
from rollhook.messages import ToolSchema
from rollhook.tools import ToolResult

if TYPE_CHECKING:
    from rollhook.sandbox.sandbox import Sandbox

#: bytes of a file, and of a command's output, that are looked at
_MOST = 1 << 20
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 1}


def _schema(name: str, about: str, properties: Mapping[str, Any], required: Sequence[str]) -> ToolSchema:
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


_SCHEMAS = (
    _schema(
        "exec",
        "Run a shell command and return its exit code and output. It gets no input.",
        {"command": _TEXT, "timeout": {**_COUNT, "description": "seconds"}},
        ["command"],
    ),
    _schema("read", "Return a text file.", {"path": _TEXT}, ["path"]),
    _schema("write", "Write a text file, in the place of what is there.", {"path": _TEXT, "content": _TEXT},
            ["path", "content"]),
    _schema(
        "view",
        "Return lines of a text file with their numbers.",
        {"path": _TEXT, "first": _COUNT, "last": _COUNT},
        ["path"],
    ),
)  # fmt: skip


class SandboxTools:
    """Implements `rollhook.tools.Tools` in one sandbox, as `user` (None: the sandbox's own).

    Whatever the policy asks for comes back as a result, an error of the sandbox itself excepted. Whoever
    calls limits the time: a cancelled call kills its command.
    """

    def __init__(self, sandbox: Sandbox, user: str | None = None) -> None:
        self._sandbox = sandbox
        self._user = user

    async def list(self) -> Sequence[ToolSchema]:
        """Return the four tools."""
        return _SCHEMAS

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call one. Raises SandboxError when the sandbox fails."""
        calls: dict[str, Callable[..., Coroutine[Any, Any, ToolResult]]] = {
            "exec": self._exec, "read": self._read, "write": self._write, "view": self._view,
        }  # fmt: skip
        if name not in calls:
            return ToolResult(f"there is no tool {name!r}; there are {', '.join(calls)}", is_error=True)
        schema = next(each["function"]["parameters"] for each in _SCHEMAS if each["function"]["name"] == name)
        if why := _misfit(arguments, schema):
            return ToolResult(why, is_error=True)
        try:
            return await calls[name](**arguments)
        except SandboxDead:
            raise
        except (OSError, SandboxError) as error:
            if isinstance(error, SandboxError) and error.kind != "user":
                raise
            return ToolResult(getattr(error, "strerror", None) or str(error), is_error=True)

    async def _exec(self, command: str, timeout: int | None = None) -> ToolResult:
        argv = ["/bin/sh", "-c", command]
        ended = await self._sandbox.exec(argv, timeout=timeout, user=self._user, max_output=_MOST)
        head = f"timed out after {timeout} s" if ended.timed_out else f"exit code {ended.exit_code}"
        printed = [part.rstrip("\n") for part in (ended.text, ended.error_text) if part]
        return ToolResult("\n".join([head, *printed]), is_error=ended.timed_out)

    async def _read(self, path: str) -> ToolResult:
        return ToolResult((await self._bytes(path)).decode("utf-8", "replace"))

    async def _bytes(self, path: str) -> bytes:
        """Return a file's bytes, as far as the user may read it."""
        if self._user is not None:
            argv = ["/bin/sh", "-c", '[ ! -r "$1" ] || [ ! -f "$1" ] || exit 0; exec cat -- "$1"', "sh", path]
            may = await self._sandbox.exec(argv, user=self._user, timeout=60.0, max_output=4096)
            if not may.ok:
                raise OSError(may.exit_code, may.error_text.strip() or f"{path} cannot be read")
        return await self._sandbox.read(path, limit=_MOST)

    async def _write(self, path: str, content: str) -> ToolResult:
        data = content.encode("utf-8", "replace")
        if self._user is None:
            await self._sandbox.write(path, data)
            return ToolResult(f"wrote {len(data)} bytes")
        argv = ["/bin/sh", "-c", 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"', "sh", path]
        ended = await self._sandbox.exec(argv, stdin=data, user=self._user, timeout=60.0)
        return ToolResult(ended.error_text or f"wrote {len(data)} bytes", is_error=not ended.ok)

    async def _view(self, path: str, first: int = 1, last: int | None = None) -> ToolResult:
        lines = (await self._bytes(path)).decode("utf-8", "replace").splitlines()
        shown = enumerate(lines[first - 1 : last], start=first)
        text = "\n".join(f"{number:6}  {line}" for number, line in shown)
        return ToolResult(text or f"the file has {len(lines)} lines", is_error=not text)


def _misfit(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return why arguments do not fit a schema of this module; empty: they do."""
    known = schema["properties"]
    if strays := ", ".join(sorted(set(arguments) - set(known))):
        return f"there is no argument {strays}; there are {', '.join(known)}"
    if missing := ", ".join(name for name in schema["required"] if name not in arguments):
        return f"the argument {missing} is missing"
    for name, value in arguments.items():
        if known[name]["type"] == "string" and not (isinstance(value, str) and "\0" not in value):
            return f"{name} must be text"
        if known[name]["type"] == "integer" and not (type(value) is int and value >= 1):
            return f"{name} must be a whole number, 1 or more"
    return ""
