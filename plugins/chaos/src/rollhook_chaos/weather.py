"""What goes wrong where: drawn from the seed and the number of the call, so that it can be had again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollhook.errors import SandboxError

if TYPE_CHECKING:
    from rollhook_chaos import ChaosConfig

DEATH_SECONDS = 0.2
#: output is cut after up to 4 KiB, as often before 64 bytes as after
CUT_BITS = 12
FULL_AFTER = 8
#: what such a disk holds where its backend limits disks
FULL_BYTES = 64 << 10
#: no UTF-8, and no part of any; a line of its own
GARBAGE = b"\xff\xfe\xc3(\xed\xa0\x80\x9f\n"


class ChaosError(SandboxError):
    """What goes wrong on purpose; another try may help."""

    kind = "retryable"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class CreateFate:
    """What befalls a create; `full_after` is the number of writes that its sandbox has room for."""

    throttled: bool = False
    lost: bool = False
    full_after: int | None = None


@dataclass(frozen=True)
class CommandFate:
    """What befalls a command: `death` in seconds after its start, `cut` after so many bytes of output."""

    death: float | None = None
    cut: int | None = None
    garbage: bool = False


class Weather:
    """Draws fates. Each depends on nothing but the seed, its name and the numbers of its call."""

    def __init__(self, config: ChaosConfig) -> None:
        self._config = config

    def draw(self, what: str, *numbers: int) -> float:
        """Return a number from 0 to below 1."""
        text = json.dumps([self._config.seed, what, *numbers]).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()) / 2**56

    def create(self, number: int) -> CreateFate:
        """Return what befalls the create with this number."""
        config = self._config
        full = self.draw("full", number) < config.full_disks
        return CreateFate(
            throttled=self.draw("throttled", number) < config.throttled,
            lost=self.draw("lost", number) < config.lost_replies,
            full_after=int(self.draw("room", number) * FULL_AFTER) if full else None,
        )

    def command(self, sandbox: int, number: int) -> CommandFate:
        """Return what befalls a command: of the create with that number, the command with this one."""
        config = self._config

        def hits(what: str, rate: float) -> bool:
            return self.draw(what, sandbox, number) < rate

        def amount(what: str, most: float) -> float:
            return self.draw(what, sandbox, number) * most

        return CommandFate(
            death=amount("when", DEATH_SECONDS) if hits("death", config.deaths) else None,
            cut=int(2 ** amount("where", CUT_BITS)) - 1 if hits("cut", config.cut_streams) else None,
            garbage=hits("garbage", config.garbage),
        )
