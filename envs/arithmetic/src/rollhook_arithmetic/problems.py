"""Word problems, made from a seed: eight families, each answer a fraction that ends as a decimal."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

_NAMES = ("Ada", "Bo", "Chidi", "Dara", "Emil", "Fatou", "Goran", "Hana", "Ines", "Jun", "Kofi", "Lena")
_THINGS = ("pencils", "apples", "stickers", "marbles", "tickets", "shells", "candles", "postcards")


@dataclass(frozen=True)
class Problem:
    """A question and its one answer."""

    family: str
    question: str
    answer: Fraction


class Numbers:
    """What a problem draws from: numbers up to `largest`, names, things."""

    def __init__(self, seed: str, largest: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - not for secrets
        self._largest = largest

    def upto(self, least: int = 2) -> int:
        """Return a number between `least` and the largest."""
        return self._random.randint(least, max(least, self._largest))

    def some(self, *values: int) -> int:
        """Return one of the values."""
        return self._random.choice(values)

    def name(self, other: str = "") -> str:
        """Return a name that is not `other`."""
        return self._random.choice([name for name in _NAMES if name != other])

    def thing(self) -> str:
        """Return a thing, in the plural."""
        return self._random.choice(_THINGS)

    def cents(self) -> Fraction:
        """Return a price in steps of five hundredths."""
        return Fraction(self._random.randint(1, 20 * min(self._largest, 100)), 20)


def make(family: str, seed: str, largest: int) -> Problem:
    """Return the problem of a family that this seed gives, with numbers up to `largest`."""
    question, answer = _FAMILIES[family](Numbers(seed, largest))
    return Problem(family, question, Fraction(answer))


def decimal(value: Fraction) -> str:
    """Return a fraction as people write it: an integer, or a decimal where that is exact."""
    if value.denominator == 1:
        return str(value.numerator)
    for digits in range(1, 7):
        scaled = value * 10**digits
        if scaled.denominator == 1:
            sign, text = "-" if value < 0 else "", str(abs(scaled.numerator)).zfill(digits + 1)
            return f"{sign}{text[:-digits]}.{text[-digits:]}"
    return str(value)


Made = tuple[str, Fraction | int]


def _sums(n: Numbers) -> Made:
    a, b = n.upto(0), n.upto(0)
    if n.some(0, 1):
        return f"What is {a} + {b}?", a + b
    return f"What is {a} - {b}?", a - b


def _shopping(n: Numbers) -> Made:
    name, thing, count, price = n.name(), n.thing(), n.upto(), n.cents()
    paid = count * price + n.some(1, 2, 5, 10)
    return (
        f"{name} buys {count} {thing} at {decimal(price)} dollars each and pays with {decimal(paid)} "
        "dollars. How many dollars of change does the shop give back?",
        paid - count * price,
    )


def _sharing(n: Numbers) -> Made:
    name, thing, friends, each = n.name(), n.thing(), n.upto(), n.upto()
    left = n.upto(0) % friends
    total = friends * each + left
    return (
        f"{name} shares {total} {thing} equally among {friends} children, as many as possible to each. "
        f"How many {thing} are left over?",
        left,
    )


def _travel(n: Numbers) -> Made:
    speed, minutes = 4 * n.upto(), n.some(15, 30, 45, 75, 90, 105, 120)
    return (
        f"A train goes {speed} kilometres per hour. How many kilometres does it go in {minutes} minutes?",
        Fraction(speed * minutes, 60),
    )


def _ages(n: Numbers) -> Made:
    first = n.name()
    second = n.name(first)
    age, more, later = n.upto(5), n.upto(1), n.upto(1)
    return (
        f"{first} is {age} years old. {second} is {more} years older. "
        f"How old are they together in {later} years?",
        2 * age + more + 2 * later,
    )


def _parts(n: Numbers) -> Made:
    name, thing, low = n.name(), n.thing(), n.some(2, 4, 5, 8, 10)
    top, total = n.some(*range(1, low)), low * n.upto()
    return (
        f"{name} has {total} {thing} and gives away {top}/{low} of them. How many {thing} does {name} keep?",
        total - total * Fraction(top, low),
    )


def _saving(n: Numbers) -> Made:
    name, start, week, weeks, spent = n.name(), n.upto(), n.cents(), n.upto(), n.cents()
    return (
        f"{name} has {start} dollars, saves {decimal(week)} dollars a week for {weeks} weeks and then spends "
        f"{decimal(spent)} dollars. How many dollars does {name} have? A debt is a negative number.",
        start + week * weeks - spent,
    )


def _work(n: Numbers) -> Made:
    thing, machines, minutes, rate = n.thing(), n.upto(), n.upto(), n.upto()
    longer = minutes * n.some(2, 3, 5)
    return (
        f"{machines} machines together make {machines * minutes * rate} {thing} in {minutes} minutes. "
        f"How many {thing} does one of them make in {longer} minutes?",
        rate * longer,
    )


_FAMILIES: Mapping[str, Callable[[Numbers], Made]] = {
    "sums": _sums,
    "shopping": _shopping,
    "sharing": _sharing,
    "travel": _travel,
    "ages": _ages,
    "parts": _parts,
    "saving": _saving,
    "work": _work,
}
