"""Problems, their answers, and what replies are read as."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.environment import Transcript
from rollhook.errors import UsageError
from rollhook.messages import message
from rollhook.testing.environment import EnvironmentContract, build_context, entered
from rollhook_arithmetic import FAMILIES, ArithmeticConfig
from rollhook_arithmetic.answers import answer_of, numbers
from rollhook_arithmetic.environment import Arithmetic
from rollhook_arithmetic.problems import decimal, make


def arithmetic(**keys):
    return Arithmetic(ArithmeticConfig(**{"count": 200, **keys}), build_context())


class TestArithmetic(EnvironmentContract):
    task_limit = 16

    @pytest.fixture
    def make_environment(self):
        return arithmetic


@given(st.sampled_from(FAMILIES), st.integers(0, 10**6), st.sampled_from([3, 20, 1000]))
def test_answers_can_be_written_exactly_and_are_read_back(family, seed, largest):
    problem = make(family, str(seed), largest)
    assert problem == make(family, str(seed), largest)
    written = decimal(problem.answer)
    assert "/" not in written
    assert answer_of(f"Answer: {written}") == problem.answer


def questions(environment, split=None):
    return [task.payload.question for task in environment.tasks(split)]


@given(st.integers(0, 6), st.integers(1, 50))
def test_a_problem_is_in_one_split_whatever_else_is_asked(seed, percent):
    few, many = arithmetic(seed=seed, count=40, heldout_percent=percent), arithmetic(seed=seed, count=80)
    most = arithmetic(seed=seed, count=80, heldout_percent=50)
    assert set(questions(few, "heldout")) <= set(questions(most, "heldout"))
    assert questions(few) == questions(many)[:40]


def test_splits_are_disjoint_and_families_are_even():
    environment = arithmetic(count=800)
    train, held = environment.tasks("train"), environment.tasks("heldout")
    assert not {t.payload.question for t in train} & {t.payload.question for t in held}
    assert 40 <= len(held) <= 120
    assert {t.family for t in held} == set(FAMILIES)
    assert environment.describe() == {"problems": f"{len(train)} train, {len(held)} heldout"}


def test_too_few_different_problems_are_refused():
    with pytest.raises(UsageError, match=r"only \d+ different problems"):
        arithmetic(families=("sums",), largest=3, count=100).tasks()


def test_a_split_that_is_not_there():
    with pytest.raises(UsageError, match="train, heldout"):
        arithmetic().tasks("test")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Answer: 12", "12"),
        ("answer is 12.", "12"),
        ("**Answer:** 12", "12"),
        ("The answer: $12.50", "25/2"),
        ("Answer: -7", "-7"),
        ("Answer: \N{MINUS SIGN}7", "-7"),
        ("Answer: -$7.25", "-29/4"),
        ("Answer: $-7.25", "-29/4"),
        ("Answer: 1,234.5 dollars", "2469/2"),
        ("Answer: 3/4", "3/4"),
        ("Answer: 1 3/4", "7/4"),
        ("Answer: .5", "1/2"),
        ("Answer: 0.50", "1/2"),
        ("Answer:\n42", "42"),
        (r"so \boxed{42} it is", "42"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"Answer: $\frac{3}{4}$", "3/4"),
        ("Answer: 3\nNo, wait. Answer: 4", "4"),
        ("3 + 4 = 7", "7"),
        ("It is 7 kilometres.", "7"),
        ("Answer: 50%", "50"),
        ("Answer: 7 km", "7"),
        ("", None),
        ("I do not know.", None),
        ("Answer: 3 or 4", None),
        ("Answer: 1 2 3 4 5 6 7 8 9", None),
        (r"\boxed{3, 4}", None),
        ("Answer: 1/0", None),
        ("abc123", None),
    ],
)
def test_what_a_reply_answers(text, value):
    assert answer_of(text) == (None if value is None else Fraction(value))


@given(st.text(max_size=300))
def test_any_text_is_read(text):
    found = answer_of(text)
    assert found is None or isinstance(found, Fraction)


@given(st.fractions(-(10**9), 10**9, max_denominator=1000).map(lambda f: Fraction(round(f * 1000), 1000)))
def test_every_way_to_write_a_number_is_the_same_number(value):
    thousands = f"{float(value):,.3f}"
    for written in (decimal(value), f"{value.numerator}/{value.denominator}", thousands):
        assert numbers(f"so {written} it is") == [value]


def test_long_and_hostile_text_is_read_in_time():
    for text in (
        "1" * 200_000,
        "1,111" * 50_000,
        "answer " * 50_000,
        r"\boxed{" * 50_000,
        "{" * 100_000,
        "1 1/" * 50_000,
    ):
        answer_of(text)


@pytest.mark.parametrize(("said", "reward"), [("The sum is right.", 0.0), (None, 0.0), ("right", 1.0)])
async def test_only_the_last_reply_counts(said, reward):
    environment = arithmetic()
    task = environment.tasks("train")[0]
    answer = f"Answer: {decimal(task.payload.answer)}"
    async with entered(environment, task, None) as phases:
        async for phase in phases:
            messages = [*phase.observation.messages, message("assistant", answer)]
            last = answer if said == "right" else said
            messages.append(message("assistant", last or ""))
            verdict = await phase.verify(Transcript(messages, "done"))
            assert verdict.reward == reward
