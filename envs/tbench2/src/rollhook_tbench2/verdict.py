"""From the reward files of a verifier to a verdict: finite numbers or none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from rollhook.environment import Verdict

#: bytes of a reward file above which it is not read
MAX_REWARD_BYTES = 64 << 10

Hide = Callable[[str], str]

#: keys that a reason names
_NAMED = 5
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


class NoRewardError(ValueError):
    """The verifier gave no reward; the text says why."""


def verdict(
    json_file: bytes | None,
    text_file: bytes | None,
    key: str,
    detail: dict[str, Any],
    hide: Hide = str,
) -> Verdict:
    """Return what reward.json, else reward.txt, says; `detail` gets `reason` when that is nothing.

    Of several keys `key` is the reward; a single key is it whatever its name. All are components. `hide` is
    what becomes of names and of text that a reason quotes.
    """
    try:
        if json_file is not None:
            components = parse_reward_json(json_file, hide)
            reward = _choose(components, key)
            _compare(reward, text_file, detail, hide)
        elif text_file is not None:
            reward = parse_reward_text(text_file, hide)
            components = {key: reward}
        else:
            raise NoRewardError("tests/test.sh wrote neither /logs/verifier/reward.json nor reward.txt")
    except NoRewardError as error:
        return Verdict(None, {}, {**detail, "reason": str(error)})
    return Verdict(reward, components, detail)


def parse_reward_json(data: bytes, hide: Hide = str) -> dict[str, float]:
    """Return the numbers of a reward.json, an object of finite ones. Raises NoRewardError otherwise."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except NoRewardError:
        raise
    except (ValueError, RecursionError) as error:
        raise NoRewardError(
            f"reward.json is not JSON: {error}" if data.strip() else "reward.json is empty"
        ) from None
    if not isinstance(value, dict) or not value:
        raise NoRewardError("reward.json holds no object with at least one key")
    if not all(name.isprintable() for name in value):
        raise NoRewardError("reward.json holds a name that is no printable text")
    return {(shown := hide(name)): _finite(number, shown, hide) for name, number in value.items()}


def parse_reward_text(data: bytes, hide: Hide = str) -> float:
    """Return the number of a reward.txt. Raises NoRewardError for anything else."""
    text = data.decode("utf-8", "replace").strip()
    if not text:
        raise NoRewardError("reward.txt is empty")
    if not _NUMBER.fullmatch(text):
        raise NoRewardError(f"reward.txt holds {hide(text)[:80]!r}, which is not a number")
    return _finite(float(text), "reward.txt", hide)


def _choose(components: dict[str, float], key: str) -> float:
    if key in components:
        return components[key]
    if len(components) == 1:
        return next(iter(components.values()))
    names = [name[:80] for name in components][:_NAMED]
    more = f" and {len(components) - _NAMED} more" if len(components) > _NAMED else ""
    raise NoRewardError(
        f"reward.json has the keys {', '.join(names)}{more} and none is {key!r}: "
        "name the one that counts in environment.reward_key"
    )


def _compare(reward: float, text_file: bytes | None, detail: dict[str, Any], hide: Hide) -> None:
    if text_file is None:
        return
    try:
        other: float | str = parse_reward_text(text_file, hide)
    except NoRewardError as error:
        other = str(error)
    if other != reward:
        detail.setdefault("warnings", []).append(
            f"reward.json says {reward:g}, which counts; reward.txt: {other}"
        )


def _finite(value: Any, name: str, hide: Hide) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        kinds: dict[type, str] = {list: "a list", dict: "an object"}
        shown = kinds.get(type(value)) or json.dumps(hide(value) if isinstance(value, str) else value)[:80]
        raise NoRewardError(f"{name[:80]} is {shown}, which is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NoRewardError(f"{name[:80]} is not finite")
    return number


def _refuse(text: str) -> float:
    raise NoRewardError(f"reward.json holds {text}, which is not finite")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise NoRewardError("reward.json holds a key twice")
    return value
