"""What every contract suite shares: declared gaps, and a way to run a suite against broken parts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest


class Contract:
    """Base of the contract classes.

    A suite that inherits one may declare `gaps = {"test_name": "reason"}`: these cases must fail, and a
    gap that has been closed fails the suite until its line is removed.
    """

    gaps: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        """Mark asynchronous cases, so that they run whatever the asyncio mode of the suite is."""
        super().__init_subclass__(**options)
        for name, case in list(vars(cls).items()):
            if name.startswith("test_") and inspect.iscoroutinefunction(case):
                setattr(cls, name, pytest.mark.asyncio(case))

    @pytest.fixture(autouse=True)
    def _declared_gap(self, request: pytest.FixtureRequest) -> None:
        expect_failure(request, self.gaps)


def expect_failure(request: pytest.FixtureRequest, gaps: Mapping[str, str]) -> None:
    """Demand that the case fails if it is one of the gaps."""
    name = request.function.__name__
    if name in gaps:
        request.applymarker(pytest.mark.xfail(reason=gaps[name], strict=True))


def failing_cases(contract: type[Contract], fixtures: Mapping[str, Callable[[], Any]]) -> set[str]:
    """Run every case of a contract outside pytest and return the names of those that fail.

    `fixtures` makes a fresh value for each parameter name. Skipped cases count as passed.
    """
    failed = set()
    for name, case in inspect.getmembers(contract, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        instance = contract()
        wanted = list(inspect.signature(case).parameters)[1:]
        try:
            result = case(instance, **{parameter: fixtures[parameter]() for parameter in wanted})
            if inspect.isawaitable(result):
                asyncio.run(_finish(result))
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - any failure counts
            failed.add(name)
    return failed


async def _finish(awaitable: Any) -> None:
    await awaitable
