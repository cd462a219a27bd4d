"""Cases of tests: any two values of different options meet, instead of every combination; and cases of nights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

_Pair = tuple[int, int, int, int]  # an option and its value, and a later option and its value


def pairwise(**options: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by rows of values, one for each option; a mapping's keys name its values. The same options
    always make the same rows. A row's id names the values that are not their option's first."""
    named = {name: _named(name, values) for name, values in options.items()}
    rows = _rows([len(values) for values in named.values()])
    parameters = []
    for row in rows:
        chosen = [values[value] for values, value in zip(named.values(), row, strict=True)]
        changed = [label for (label, _), value in zip(chosen, row, strict=True) if value]
        parameters.append(pytest.param(*(value for _, value in chosen), id="-".join(changed) or "plain"))
    return pytest.mark.parametrize(list(options), parameters)


def nightly(*values: Any) -> list[Any]:
    """Values of a parameter, or tuples of those of several, whose cases are not run before a commit."""
    each = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*value, marks=pytest.mark.nightly) for value in each]


def _named(option: str, values: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    if isinstance(values, Mapping):
        return list(values.items())
    return [(option if value is True else str(value).removeprefix("torch."), value) for value in values]


def _rows(sizes: Sequence[int]) -> list[list[int]]:
    """Each row begins with a pair that no row has yet; its other values are those that add the most new pairs."""
    wanted = {
        (one, value, other, another)
        for one, other in itertools.combinations(range(len(sizes)), 2)
        for value in range(sizes[one])
        for another in range(sizes[other])
    }
    order = sorted(range(len(sizes)), key=lambda option: (-sizes[option], option))
    left, rows = set(wanted), []
    while left:
        one, value, other, another = min(left, key=lambda pair: (-sizes[pair[0]] * sizes[pair[2]], pair))
        row = {one: value, other: another}
        for option in order:
            if option not in row:
                row[option] = max(range(sizes[option]), key=lambda value: (_new(row, option, value, left), -value))  # noqa: B023
        rows.append([row[option] for option in range(len(sizes))])
        left -= _pairs(rows[-1])
    assert wanted == set().union(*map(_pairs, rows))
    return rows


def _pairs(row: Sequence[int]) -> set[_Pair]:
    return {(one, row[one], other, row[other]) for one, other in itertools.combinations(range(len(row)), 2)}


def _new(row: Mapping[int, int], option: int, value: int, left: set[_Pair]) -> int:
    """How many pairs of `left` the value of the option would add to the row."""
    return sum(
        ((option, value, other, another) if option < other else (other, another, option, value)) in left
        for other, another in row.items()
    )
