"""Shapes are checked at the first calls of each function in a test: checking every call took a third of all time."""

import sys
from collections import Counter
from functools import wraps

FIRST = 4  # checks, of arguments or of what is returned
checks = Counter()  # of each function, since the test began


def first_calls(signature):
    """Beartype for jaxtyping, which obeys the mark of a function that has been checked enough."""
    from beartype import beartype

    check = beartype(signature)

    @wraps(check)
    def counted(*given, **named):
        function = sys._getframe(1).f_locals["fn"]
        checks[function] += 1
        function.__no_type_check__ = checks[function] >= FIRST
        return check(*given, **named)

    return counted


def begin():
    for function in checks:
        function.__no_type_check__ = False
    checks.clear()
