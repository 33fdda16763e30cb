"""Reading the number that a reply gives as its answer."""

from __future__ import annotations

import re
from fractions import Fraction

#: characters at the end of a reply in which its answer is looked for
READ = 4000
_MARK = re.compile(r"answer\s*(?:is\b)?\s*[:=]?", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{([^{}]{0,100}(?:\{[^{}]{0,50}\}[^{}]{0,50}){0,4})\}")
_LATEX = re.compile(r"\\[dt]?frac\s*\{\s*(\d{1,30})\s*\}\s*\{\s*(\d{1,30})\s*\}")
_NUMBER = re.compile(
    r"""
    (?<![\w.,/])-?\s?[$€£]?\s?-?
    (?:(?P<whole>\d{1,30})\s(?P<top>\d{1,30})/(?P<low>\d{1,30})
      |(?P<over>\d{1,30})\s?/\s?(?P<under>\d{1,30})
      |(?P<int>\d{1,3}(?:,\d{3})+|\d{1,30})?(?P<point>\.\d{1,30})?)
    (?P<percent>\s?%)?(?![\w/]|[.,]\d)
    """,
    re.VERBOSE,
)


def answer_of(text: str) -> Fraction | None:
    r"""Return the number that a reply gives as its answer; None where it gives none, or several.

    What is in the last `\boxed{...}` counts, else the line after the last `Answer`, in which there must be
    one number only; without either the last number of the reply. `1,234`, `12.50`, `$12.50`, `-3`, `3/4`,
    `1 3/4` and `\frac{3}{4}` are numbers; `50%` is fifty.
    """
    text = _LATEX.sub(r"\1/\2", text[-READ:].replace("\N{MINUS SIGN}", "-").replace("\\$", "$"))
    if boxed := _BOXED.findall(text):
        return _only(boxed[-1])
    marks = list(_MARK.finditer(text))
    if marks:
        line = next(iter(text[marks[-1].end() :].strip().splitlines()), "")
        if found := numbers(line):
            return found[0] if len(set(found)) == 1 else None
    found = numbers(text)
    return found[-1] if found else None


def _only(text: str) -> Fraction | None:
    found = numbers(text)
    return found[0] if len(found) == 1 else None


def numbers(text: str) -> list[Fraction]:
    """Return the numbers in a text, in order."""
    found = []
    for match in _NUMBER.finditer(text):
        value = _value(match)
        if value is not None:
            found.append(-value if "-" in match[0] else value)
    return found


def _value(match: re.Match[str]) -> Fraction | None:
    if match["top"] is not None:
        return Fraction(int(match["whole"])) + _ratio(match["top"], match["low"])
    if match["over"] is not None:
        return _ratio(match["over"], match["under"]) if int(match["under"]) else None
    if match["int"] is None and match["point"] is None:
        return None
    return Fraction((match["int"] or "0").replace(",", "") + (match["point"] or ""))


def _ratio(top: str, low: str) -> Fraction:
    return Fraction(int(top), int(low)) if int(low) else Fraction(0)
