"""What a sandbox backend supplies: create, raw processes, bytes, list and delete. Nothing else.

What timeouts, whole-tree kill, output caps, partial output, directory transfer and safe extraction
mean is written once, in `rollhook.sandbox.sandbox`, on top of this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from rollhook.component import BuildContext
from rollhook.errors import SandboxError
from rollhook.sandbox.prices import Prices


@dataclass(frozen=True)
class SandboxSpec:
    """What is asked of a sandbox; None means the backend's default.

    `image` is a container image reference (capability `image`). `dockerfile` is the text of a Dockerfile
    and `context_dir` the directory of this host that its COPY lines refer to (capability `image_build`);
    `build_seconds` limits the building. `workdir` is where commands start; `user` runs those that name no
    user (capability `user`). `memory_bytes`, `cpus`, `pids` and `disk_bytes` are limits. `network` False
    asks for none, but for the host names in `network_allow` (capability `network_allowlist`).
    `lifetime_seconds` is the dead-man's switch that the provider itself enforces where it can; `labels`
    carry the lease.
    """

    image: str | None = None
    dockerfile: str | None = None
    context_dir: str | None = None
    build_seconds: float | None = None
    workdir: str = "/work"
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    memory_bytes: int | None = None
    cpus: float | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    network: bool = False
    network_allow: tuple[str, ...] = ()
    lifetime_seconds: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


def unmet(spec: SandboxSpec, capabilities: Collection[str]) -> list[str]:
    """Return what `spec` asks for beyond these capabilities, each as words that follow "cannot"."""
    asked = [
        ("image", spec.image is not None, f"run the container image {spec.image}"),
        ("image_build", spec.dockerfile is not None, "build an image from a Dockerfile"),
        ("user", spec.user not in (None, "root", "0"), f"run commands as user {spec.user}"),
        ("network_on", spec.network, "offer a network"),
        ("network_allowlist", bool(spec.network_allow), "allow only certain hosts on the network"),
    ]
    return [words for capability, wanted, words in asked if wanted and capability not in capabilities]


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as the provider lists it; `created_at` in epoch seconds where known."""

    id: str
    labels: Mapping[str, str]
    created_at: float | None = None


class RawProcess(Protocol):
    """A started process. stdout and stderr are separate byte streams unless the backend says `merged`."""

    def stdout(self) -> AsyncIterator[bytes]:
        """Yield chunks until end of file; called once."""

    def stderr(self) -> AsyncIterator[bytes]:
        """Yield chunks until end of file; called once."""

    async def write_stdin(self, data: bytes) -> None:
        """Write and drain; BrokenPipeError once nobody reads."""

    async def close_stdin(self) -> None:
        """Signal end of file."""

    async def wait(self) -> int:
        """Return the exit code of the process itself (128 + n for signal n), not of its children.

        Returns when the process has ended even if a child keeps its output open.
        """

    async def kill(self) -> None:
        """Kill the process itself, best effort; the core kills the tree."""

    async def aclose(self) -> None:
        """Drop the handle and its pipes; the process, if alive, is not the handle's concern."""


class RawSandbox(ABC):
    """One live sandbox, as its backend made it."""

    id: str
    #: what it was made from
    spec: SandboxSpec = SandboxSpec()
    #: pids of the backend's own processes as seen inside: never killed by quiesce, never in a census
    own_pids: frozenset[int] = frozenset({1})

    @abstractmethod
    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = False,
    ) -> RawProcess:
        """Start `argv` without a shell, in a session of its own.

        Without `user` it runs as the user that may do most here, so that it can kill and remove what others
        left; the core passes `spec.user` for commands that name none.
        `env` adds to the sandbox's own. Without `stdin` the process reads from /dev/null. A program that
        is not there ends with exit code 127, one that cannot be executed (or whose `cwd` is gone) with 126
        and the reason on stderr, as under a shell. Raises SandboxDead; SandboxError(kind="user") for an
        unknown `user`.
        """

    @abstractmethod
    async def read(self, path: str, *, limit: int) -> bytes:
        """Return a regular file's bytes, following links only inside the sandbox.

        Raises FileNotFoundError, IsADirectoryError, PermissionError; SandboxError(kind="user") when the
        file is larger than `limit` bytes.
        """

    @abstractmethod
    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, making its parents; an existing file is replaced, an existing symlink is too."""

    @abstractmethod
    async def alive(self) -> bool:
        """Return whether commands can still be run here."""

    async def touch(self) -> None:
        """Tell the provider that the sandbox is in use; nothing to do for most."""

    async def kill_tree(self, mark: str) -> Sequence[tuple[int, str]] | None:
        """Kill processes until none is left and return them as (pid inside, command).

        Those whose environment holds `mark` in `ROLLHOOK_EXEC` and all that descend from them; with ""
        every process but `own_pids`. Raises SandboxDead. None (the default): there is no shortcut, and
        the core does it with a script.
        """
        return None

    async def remove(self, paths: Sequence[str]) -> Sequence[bool] | None:
        """Remove absolute paths with all below them, following no link; return which existed.

        None (the default): there is no shortcut, and the core does it with a script.
        """
        return None


class SandboxBackend(ABC):
    """A provider of sandboxes. One instance per process and event loop; no I/O in the constructor."""

    #: what this backend can do, out of `KNOWN_CAPABILITIES`; a declared one is proven by the contract
    capabilities: frozenset[str] = frozenset()
    #: True: not isolated from the host; refused in a recipe that trains
    unsafe: ClassVar[bool] = False
    #: True: sandboxes are on other machines, which reach this one by `gateway.public_url` only
    elsewhere: ClassVar[bool] = False
    #: whose limits creates count against, such as a provider's endpoint; "": those of the backend's name
    account: str = ""
    #: what the provider cannot do: name of a case of the contract -> reason. The suite expects exactly
    #: these cases to fail, and `rollhook show` prints them
    gaps: Mapping[str, str] = {}

    def __init__(self, config: Any, context: BuildContext) -> None:
        self.config = config
        self.context = context

    def missing(self) -> Sequence[str]:
        """Return what this machine plainly lacks for these sandboxes, each as a sentence with the way out.

        For `rollhook check`: looks at files and variables at most, and asks no service; `start` does.
        """
        return ()

    async def start(self) -> None:
        """Check that sandboxes can be made here; raises SandboxError(kind="user") with the way to get it."""

    @abstractmethod
    async def create(self, spec: SandboxSpec) -> RawSandbox:
        """Make one sandbox, ready to run commands.

        Raises SandboxError(kind="user") for a spec that it cannot meet (`refuse` says it for those that the
        capabilities name). Cancelled or failing, it must leave nothing behind that `list` would not show.
        """

    @abstractmethod
    async def list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Return the sandboxes that carry all these labels, made by any process of this user."""

    @abstractmethod
    async def delete(self, sandbox_id: str) -> None:
        """Delete a sandbox and all that runs in it; one that is already gone is a success."""

    async def bake(self, spec: SandboxSpec) -> str:
        """Make whatever a create of this spec would first need: an image, a template, a snapshot.

        Returns its name, "" (the default) where nothing needs to be made. What is there already is not made
        again, and one is built however many ask. Raises SandboxError(kind="user") with the end of the log
        for a build that fails.
        """
        self.refuse(spec)
        return ""

    async def adopt(self, sandbox_id: str, spec: SandboxSpec) -> RawSandbox:
        """Attach to a sandbox of this spec whose create gave no answer; needs the capability `adopt`.

        It was found by `list` under the nonce of its lease. Returns it ready to run commands; raises
        SandboxDead when it cannot be used, and the pool deletes it.
        """
        raise NotImplementedError(f"{type(self).__name__} declares the capability `adopt` without the method")

    def refuse(self, spec: SandboxSpec) -> None:
        """Raise SandboxError(kind="user") for what `spec` asks beyond the capabilities of this backend."""
        if missing := unmet(spec, self.capabilities):
            raise SandboxError(
                f"these sandboxes cannot {' or '.join(missing)}; use a sandbox backend that can", kind="user"
            )

    def price_per_second(self, spec: SandboxSpec) -> float | None:
        """Return what a sandbox of this spec costs a second by the key `prices`; None: not known."""
        prices = getattr(getattr(self, "config", None), "prices", None)
        return prices.per_second(spec.cpus, spec.memory_bytes) if isinstance(prices, Prices) else None

    def retryable(self, error: Exception) -> bool:
        """Return whether a create that failed so may succeed if tried again (throttled, unreachable).

        The error may carry `retry_after`, seconds until then, and `wait`, true for a quota that other
        sandboxes free again as they end: such a try does not count, the episode's deadline ends it.
        """
        return False

    def ambiguous(self, error: Exception) -> bool:
        """Return whether a create that failed so may have made a sandbox all the same: its reply was lost.

        By default all but errors of the caller and those that carry `retry_after`, a refusal.
        """
        refused = getattr(error, "retry_after", None) is not None
        return not refused and getattr(error, "kind", None) != "user"

    def describe(self) -> Mapping[str, str]:
        """Return what is in force here, for `doctor` and the run's log: mode, limits, gaps."""
        return {}

    async def aclose(self) -> None:
        """Release the client; sandboxes are not deleted. Safe to call twice."""


KNOWN_CAPABILITIES = frozenset(
    {
        "image",  # runs a container image by reference
        "image_build",  # builds one from `dockerfile` and `context_dir`
        "isolation",  # own file system view and process tree
        "network_off",  # can deny all network
        "network_on",  # can offer a network
        "network_allowlist",  # can deny all network but certain host names
        "adopt",  # attaches to a sandbox whose create gave no answer
        "separate_streams",  # stdout and stderr apart
        "user",  # commands as another user
        "memory_limit",
        "pids_limit",
        "cpu_limit",
        "disk_limit",
    }
)
