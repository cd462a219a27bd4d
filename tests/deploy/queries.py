"""Reads PromQL as far as the tests need it: which series an expression names."""

from __future__ import annotations

import re
from collections.abc import Iterator

# A string, a selector's braces with what is in them, a name, or anything else.
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\{(?:[^}"]|"(?:[^"\\]|\\.)*")*\}|[A-Za-z_:][A-Za-z0-9_:]*|\s+|.', re.DOTALL)
GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
WORDS = {"and", "or", "unless", "bool", "offset", "start", "end", "inf", "nan"}
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')


def selectors(expression: str) -> list[tuple[str, str]]:
    """[(metric, braces)]: `braces` with the matchers, or empty."""
    tokens = [token for token in TOKEN.findall(expression) if not token.isspace()]
    found: list[tuple[str, str]] = []
    depth_of_labels = 0
    for number, token in enumerate(tokens):
        following = tokens[number + 1] if number + 1 < len(tokens) else ""
        before = tokens[number - 1] if number else ""
        if depth_of_labels:  # labels in the parentheses behind by, on and the like
            depth_of_labels += {"(": 1, ")": -1}.get(token, 0)
            if token == ")" and depth_of_labels == 1:
                depth_of_labels = 0
        elif token.lower() in GROUPING:
            depth_of_labels = 1 if following == "(" else 0
        elif (
            re.match(r"[A-Za-z_:]", token)
            and following != "("
            and token.lower() not in WORDS
            and not re.match(r"[\d.\[:]", before)  # the unit of a duration, as in 5m
            and following.lower() not in GROUPING  # an operator, as in sum by (x)
        ):
            found.append((token, following if following.startswith("{") else ""))
    return found


def metric_names(expression: str) -> set[str]:
    return {name for name, _ in selectors(expression)}


def narrow_selectors(expression: str) -> Iterator[str]:
    """Every series that the expression counts on, one selector each: `x{a=~"b|c"}` gives x{a="b"} and x{a="c"}."""
    for name, braces in selectors(expression):
        alternatives = [""]
        for label, operator, value in MATCHER.findall(braces):
            values = [f'{label}{operator}"{value}"']
            if operator == "=~" and re.fullmatch(r"[\w|]+", value):
                values = [f'{label}="{one}"' for one in value.split("|")]
            alternatives = [f"{done},{one}" if done else one for done in alternatives for one in values]
        yield from (f"{name}{{{matchers}}}" for matchers in alternatives)
