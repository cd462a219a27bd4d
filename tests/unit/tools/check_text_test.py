#!/usr/bin/python3
"""The text checks catch what they are there for."""
import os
import sys
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import check_text  # noqa: E402


def messages(path, text):
    return list(check_text.violations_of(path, text))


class TextRules(unittest.TestCase):
    def test_a_clean_file_passes(self):
        self.assertEqual(messages("kernels/a.cc", "int a;  // see /usr/share/doc and /tmp/x\n"), [])

    def test_a_file_past_the_limit_is_named_with_its_length(self):
        self.assertEqual(messages("kernels/a.cc", "\n" * 800), [])
        self.assertIn("801 lines", messages("kernels/a.cc", "\n" * 801)[0])

    def test_prose_may_be_longer(self):
        self.assertEqual(messages("docs/a.md", "\n" * 801), [])

    def test_paths_of_one_machine_are_found(self):
        for path in ("/ho" "me/someone/x", "/ro" "ot/x", "/wo" "rk/main"):
            self.assertEqual(len(messages("docs/a.md", f"see {path}\n")), 1, path)
        self.assertEqual(messages("docs/a.md", "see tests/wo" "rk/main and $HO" "ME/ro" "ot/x\n"), [])

    def test_notes_of_unfinished_work_are_found(self):
        for note in ("TO" "DO", "FIX" "ME", "X" "XX"):
            self.assertEqual(len(messages("kernels/a.cc", f"// {note}: later\n")), 1, note)

    def test_comments_that_name_no_subject_are_found(self):
        for path, line in (("a.cc", "// {}"), ("a.h", "  int a;  // {}"), ("a.c", "/* {} */"), ("a.py", "# {}"), ("a.py", '    """{}"""'),
                           ("a.sh", "run  # {}"), ("a.proto", "  // {}"), ("a.yml", "    # {}"), ("CMakeLists.txt", "# {}")):
            self.assertEqual(len(messages(path, line.format("O" "f the next chunk.") + "\n")), 1, line)
            self.assertEqual(messages(path, line.format("The next chunk's.") + "\n"), [], line)
            self.assertEqual(messages(path, line.format("Often.") + "\n"), [], line)
        self.assertEqual(messages("docs/a.md", "# O" "f heads\n"), [])
        self.assertEqual(messages("a.cc", 'Say("# O" "f");\n'), [])

    def test_waits_that_grpc_may_never_end_are_found(self):
        for call in ("channel->WaitForConnected(deadline)", "channel.WaitForStateChange(state, deadline)"):
            self.assertEqual(len(messages("client/a.cc", f"{call};\n")), 1, call)
        self.assertEqual(messages("client/a.cc", "AwaitConnected(channel, until);\n"), [])

    def test_rulers_are_found(self):
        for line in ("// --- Sessions", "  // --- Chunks ---", "# ------", "// ====="):
            self.assertEqual(len(messages("kernels/a.cc", line + "\n")), 1, line)
        self.assertEqual(messages("kernels/a.cc", "// -1: none\n// a --- b\n"), [])

    def test_long_lines_of_cmake_are_found(self):
        for path in ("cmake/a.cmake", "tests/CMakeLists.txt"):
            self.assertEqual(len(messages(path, "a" * 121 + "\n")), 1, path)
            self.assertEqual(messages(path, "a" * 120 + "\n"), [], path)

    def test_folders_with_too_many_files_are_found(self):
        self.assertEqual(len(list(check_text.full_folders_of([f"kernels/{n}.cc" for n in range(41)]))), 1)
        self.assertEqual(list(check_text.full_folders_of([f"kernels/{n % 2}/{n}.cc" for n in range(80)])), [])

    def test_long_lines_of_prose_are_found(self):
        long = "word " * 25
        for text in (long, f"- {long}", f"# {long}", f"  {long}", f"- a\n  {long}", f"- a\n\n  {long}", f"1. a\n\n   {long}",
                     f"a\n    {long}", f"```\na\n```\n{long}", f"    a\n\n{long}", f"- a\n\n      a\n\n  {long}"):
            self.assertEqual(len(list(check_text.long_prose_of("a.md", text + "\n"))), 1, text)
            shorter = text.replace(long, "word " * 20)
            self.assertEqual(list(check_text.long_prose_of("a.md", shorter + "\n")), [], shorter)

    def test_what_cannot_be_wrapped_may_be_longer(self):
        long = "word " * 25
        for text in (f"| {long} |", f"> {long}", f"![{long}](a.png)", "https://example.com/" + "a" * 120, "- `" + "a" * 120 + "`",
                     f"    {long}", f"a\n\n    {long}", f"```\n{long}\n```", f"- a\n\n      {long}", f"    a\n\n    {long}",
                     f"1. a\n\n       {long}"):
            self.assertEqual(list(check_text.long_prose_of("a.md", text + "\n")), [], text)

    def test_stray_white_space_is_found(self):
        self.assertEqual(len(messages("kernels/a.cc", "int a; \n")), 1)
        self.assertEqual(len(messages("kernels/a.cc", "int a;")), 1)


if __name__ == "__main__":
    unittest.main()
