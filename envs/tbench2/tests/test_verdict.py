"""Reward files: finite numbers or no verdict."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook_tbench2.verdict import NoRewardError, parse_reward_json, parse_reward_text, verdict


def judged(json_file: bytes | None, text_file: bytes | None) -> tuple[float | None, dict[str, Any]]:
    found = verdict(json_file, text_file, "reward", {})
    return found.reward, dict(found.detail)


@pytest.mark.parametrize(
    ("text", "reward"), [("1\n", 1), (" 0.5 ", 0.5), ("1e-3", 0.001), ("-2", -2), (".5", 0.5), ("1.", 1)]
)
def test_reward_txt_holds_one_number(text: str, reward: float) -> None:
    assert judged(None, text.encode()) == (reward, {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "reward.txt is empty"),
        (" \n", "reward.txt is empty"),
        ("nan", "reward.txt holds 'nan', which is not a number"),
        ("inf", "reward.txt holds 'inf', which is not a number"),
        ("True", "reward.txt holds 'True', which is not a number"),
        ("1_000", "reward.txt holds '1_000', which is not a number"),
        ("1 0", "reward.txt holds '1 0', which is not a number"),
        ("0x1", "reward.txt holds '0x1', which is not a number"),
        ("1e999", "reward.txt is not finite"),
        ("\ufffd", "reward.txt holds '\ufffd', which is not a number"),
    ],
)
def test_a_bad_reward_txt_is_no_verdict(text: str, why: str) -> None:
    assert judged(None, text.encode()) == (None, {"reason": why})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "reward.json is empty"),
        ("{", "reward.json is not JSON: "),
        ("[1]", "reward.json holds no object with at least one key"),
        ("1", "reward.json holds no object with at least one key"),
        ("{}", "reward.json holds no object with at least one key"),
        ('{"reward": true}', "reward is true, which is not a number"),
        ('{"reward": "1"}', 'reward is "1", which is not a number'),
        ('{"reward": null}', "reward is null, which is not a number"),
        ('{"reward": NaN}', "reward.json holds NaN, which is not finite"),
        ('{"reward": -Infinity}', "reward.json holds -Infinity, which is not finite"),
        ('{"reward": 1e309}', "reward is not finite"),
        ('{"reward": 1' + "0" * 400 + "}", "reward is not finite"),
        ('{"reward": 1, "extra": NaN}', "reward.json holds NaN, which is not finite"),
        ('{"reward": 0, "reward": 1}', "reward.json holds a key twice"),
        ('{"a": 1, "b": 0}', "reward.json has the keys a, b and none is 'reward'"),
        ('{"a\\ud800": 1}', "reward.json holds a name that is no printable text"),
        ('{"a\\nb": 1}', "reward.json holds a name that is no printable text"),
        (
            json.dumps({f"k{n}": 1 for n in range(2000)}),
            "reward.json has the keys k0, k1, k2, k3, k4 and 1995 more and",
        ),
        ("[" * 100_000, "reward.json is not JSON: "),
        ('{"reward": 1' + "0" * 5000 + "}", "reward.json is not JSON: "),
    ],
)
def test_a_bad_reward_json_is_no_verdict_even_beside_a_good_reward_txt(text: str, why: str) -> None:
    reward, detail = judged(text.encode(), b"1")
    assert reward is None
    assert detail["reason"].startswith(why)


def test_reward_json_counts_before_reward_txt_and_a_difference_is_a_warning() -> None:
    reward, detail = judged(b'{"reward": 0.25}', b"1")
    assert reward == 0.25
    assert detail["warnings"] == ["reward.json says 0.25, which counts; reward.txt: 1.0"]
    assert judged(b'{"reward": 1}', b"1") == (1, {})


def test_several_keys_are_components() -> None:
    found = verdict(b'{"reward": 0.5, "style": 1, "speed": 0.25}', None, "reward", {})
    assert found.reward == 0.5
    assert found.components == {"reward": 0.5, "style": 1, "speed": 0.25}


def test_the_only_key_is_the_reward_and_another_can_be_named() -> None:
    assert verdict(b'{"score": 0.5}', None, "reward", {}).reward == 0.5
    assert verdict(b'{"a": 1, "b": 0}', None, "b", {}).reward == 0


def test_no_file_is_no_verdict() -> None:
    reward, detail = judged(None, None)
    assert reward is None
    assert detail["reason"] == "tests/test.sh wrote neither /logs/verifier/reward.json nor reward.txt"


@given(st.binary(max_size=200))
def test_any_bytes_give_a_finite_number_or_a_reason(data: bytes) -> None:
    for files in ((data, None), (None, data), (data, data)):
        found = verdict(*files, "reward", {})
        assert ("reason" in found.detail) == (found.reward is None)
        assert found.reward is None or math.isfinite(found.reward)


@given(
    st.dictionaries(
        st.text(min_size=1).filter(str.isprintable),
        st.floats(allow_nan=False, allow_infinity=False),
        min_size=1,
    )
)
def test_finite_numbers_survive(numbers: dict[str, float]) -> None:
    assert parse_reward_json(json.dumps(numbers).encode()) == numbers


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_printed_number_is_read_back(number: float) -> None:
    assert parse_reward_text(repr(number).encode()) == number


def test_a_bad_file_raises_its_reason() -> None:
    with pytest.raises(NoRewardError, match="empty"):
        parse_reward_text(b"")
