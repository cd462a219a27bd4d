#!/usr/bin/python3
"""The table of mutants fits the sources, and an entry that does not is named."""
import os
import sys
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import mutants  # noqa: E402


def entry(number, original, mutated=""):
    return {"number": number, "file": "a.cc", "original": original, "mutated": mutated, "breaks": ""}


class Mutants(unittest.TestCase):
    def test_the_whole_table_applies(self):
        table = mutants.read_table()
        self.assertEqual(mutants.mutated_files(table)[1], [])
        self.assertEqual([mutant["number"] for mutant in table], list(range(1, 41)))

    def test_both_texts_of_a_fault_are_there(self):
        text, stale = mutants.with_mutants("if (a <= b) ++c;\n", [entry(1, "a <= b", "a < b"), entry(2, "++c;")])
        self.assertEqual(stale, [])
        self.assertIn("if ((LOSSD_MUTANT(1) ? (a < b) : (a <= b))) { if (LOSSD_MUTANT(2)) {  } else { ++c; } }\n", text)

    def test_a_stale_entry_is_named(self):
        for text, original in (("x", "y"), ("y y", "y")):
            self.assertRegex(" ".join(mutants.with_mutants(text, [entry(7, original)])[1]), "^mutant 7: stands [02] times in a.cc: y$")
        self.assertRegex(" ".join(mutants.with_mutants("a + b", [entry(1, "a +"), entry(2, "+ b")])[1]), "^mutant 1: overlaps")
        self.assertEqual(len(mutants.mutated_files([entry(7, "y")])[1]), 1)


if __name__ == "__main__":
    unittest.main()
