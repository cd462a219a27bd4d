#!/usr/bin/env python3
"""Names the tests of JUnit reports (ctest's, pytest's) that did not pass, a line each, with why in a few words."""
import sys
import xml.etree.ElementTree as ElementTree


def reason(case):
    """Why `case` did not pass; None if it did."""
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            words = (child.get("message") or child.text or "").split("\n", 1)[0].strip()
            return f"{child.tag}: {words[:200]}" if words else child.tag
    return "disabled" if case.get("status") in ("disabled", "notrun") else None


def main():
    for path in sys.argv[1:]:
        for case in ElementTree.parse(path).iter("testcase"):
            why = reason(case)
            if why is not None:
                owner = case.get("classname")
                name = case.get("name")
                print(name if owner in (None, "", name) else f"{owner}.{name}", why, sep=": ")


if __name__ == "__main__":
    main()
