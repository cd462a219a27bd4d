#!/usr/bin/python3
"""head load, head save and flush move every bit, and lose none when something goes wrong.

usage: lossctl_transfers_test.py LOSSD LOSSCTL WINDOW_FILLER
"""
import ctypes
import json
import math
import os
import signal
import pty
import random
import resource
import struct
import subprocess
import time
import unittest

from lossctl_harness import (EXHAUSTED, FAILED, INVALID, LOSSCTL, NOT_FOUND, REFUSED, USAGE, LossctlTest,
                             read_safetensors, read_to_end, to_bfloat16, to_float32, write_safetensors)
from programs import Program

V, H = 257, 33
TENSOR = "lm_head.weight"
GRADIENT = "lm_head.weight.grad"
BIAS, BIAS_GRADIENT = "lm_head.bias", "lm_head.bias.grad"


def random_bits(dtype, seed):
    """V x H elements of every finite bit pattern: normal, subnormal, zeros of both signs."""
    bits = random.Random(seed)
    if dtype == "F32":
        words = [bits.getrandbits(32) for _ in range(V * H)]
        return struct.pack(f"<{V * H}I", *(word & ~(1 << 30) if word >> 23 & 0xFF == 0xFF else word for word in words))
    words = [bits.getrandbits(16) for _ in range(V * H)]
    shift, mask = (7, 0xFF) if dtype == "BF16" else (10, 0x1F)
    return struct.pack(f"<{V * H}H", *(word & ~(1 << 14) if word >> shift & mask == mask else word for word in words))


def small_floats(seed):
    values = random.Random(seed)
    return struct.pack(f"<{V * H}f", *(values.gauss(0, 0.1) for _ in range(V * H)))


def bias_floats(seed):
    values = random.Random(seed)
    return struct.pack(f"<{V}f", *(values.gauss(0, 1) for _ in range(V)))


def limit_file_size(limit):
    """What a full disk looks like without being root: writes past `limit` bytes fail."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def obey_modes():
    """Root, too, is refused what the mode of a file forbids: what it executes loses CAP_DAC_OVERRIDE and _READ_SEARCH."""
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; others than root need none


# Files that cannot be written: what lossctl is run with, its exit code, and words on what to do.
UNWRITABLE = {
    "out": (limit_file_size(16384), EXHAUSTED, "raise the quota or file-size limit, or write it elsewhere"),
    "nowhere/out": (None, NOT_FOUND, "create its directory first, or name a file elsewhere"),
    "plain/out": (None, INVALID, "create its directory first, or name a file elsewhere"),
    "closed/out": (obey_modes, FAILED, "name a file in a directory that this user may write to"),
    "dir": (None, INVALID, "is a directory; name a new file or one to replace"),
    "/dev/full": (None, INVALID, "is not a regular file; name a new file or one to replace"),
    "/dev/stdout": (None, INVALID, "; name a new file or one to replace"),
}
# Those that cannot be read.
UNREADABLE = {
    "nowhere/in": (NOT_FOUND, "No such file"),
    "plain/in": (INVALID, "Not a directory"),
    "secret": (FAILED, "Permission denied"),
    "dir": (NOT_FOUND, "neither model.safetensors.index.json nor"),
    "plain": (INVALID, "not a valid safetensors file"),
    "/dev/null": (INVALID, "not a regular file"),
}
SERVERS_HINT = r"server|trainer|head list|run it again"


class LoadAndSave(LossctlTest):
    def test_round_trip_is_bit_exact(self):
        for dtype, name in (("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16")):
            with self.subTest(dtype=dtype):
                data = random_bits(dtype, seed=1)
                write_safetensors(self.path("in"), {TENSOR: (dtype, [V, H], data)})
                loaded = self.succeed_json("head", "load", f"trip-{name}", "in", "--create")
                self.assertEqual(loaded, {"head": f"trip-{name}", "file": "in", "tensor": TENSOR, "file_dtype": name,
                                          "vocab_size": V, "hidden_size": H, "dtype": name, "weight_version": 1})
                saved = self.succeed_json("head", "save", f"trip-{name}", "out")
                self.assertEqual((saved["dtype"], saved["bytes"], saved["weight_version"]), (name, len(data), 1))
                self.assertEqual(read_safetensors(self.path("out"))[0], {TENSOR: (dtype, [V, H], data)})

    def test_a_head_made_for_a_file_has_the_loss_that_was_asked_for(self):
        write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], small_floats(1))})
        command = ["head", "load", "made", "in", "--create", "--softcap", "30", "--logit_scale", "0.5"]
        self.assertEqual(self.succeed_json(*command, "--frozen")["weight_version"], 1)
        head = self.head("made")
        self.assertEqual([head[key] for key in ("logit_scale", "softcap", "frozen")], [0.5, 30, True])
        self.assertIn("frozen", self.error_of(REFUSED, *command))

    def test_text_says_what_was_done(self):
        write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], small_floats(1))})
        text = self.succeed("head", "load", "told", "in", "--create", "--dtype", "bf16")
        self.assertIn("257 x 33 bfloat16, weight version 1", text)
        self.assertIn("float32: values were converted to bfloat16", text)
        self.assertIn("257 x 33 bfloat16", self.succeed("head", "save", "told", "out"))

    def test_conversions_round_to_nearest_even(self):
        data = random_bits("F32", seed=2)
        # Values that would round to infinity are another matter.
        data = struct.pack(f"<{V * H}I", *(word & ~(1 << 29) for word in struct.unpack(f"<{V * H}I", data)))
        write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], data)})
        self.succeed("head", "load", "rounded", "in", "--create", "--dtype", "bfloat16")
        self.succeed("head", "save", "rounded", "narrow")
        self.assertEqual(read_safetensors(self.path("narrow"))[0][TENSOR][2], to_bfloat16(data))
        self.succeed("head", "save", "rounded", "wide", "--dtype", "float32", "--tensor", "w")
        self.assertEqual(read_safetensors(self.path("wide"))[0], {"w": ("F32", [V, H], to_float32(to_bfloat16(data)))})

    def test_conversions_to_float16_round_to_nearest_even(self):
        data = small_floats(2)
        write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], data)})
        self.succeed("head", "load", "halves", "in", "--create", "--dtype", "float16")
        self.succeed("head", "save", "halves", "narrow")
        expected = struct.pack(f"<{V * H}e", *struct.unpack(f"<{V * H}f", data))
        self.assertEqual(read_safetensors(self.path("narrow"))[0], {TENSOR: ("F16", [V, H], expected)})

    def test_data_that_is_not_aligned_is_read_all_the_same(self):
        data = small_floats(3)
        for padding in range(4):
            write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], data)}, padding)
            self.succeed("head", "load", "shifted", "in", "--create")
            self.succeed("head", "save", "shifted", "out")
            self.assertEqual(read_safetensors(self.path("out"))[0][TENSOR][2], data, padding)

    def test_a_second_load_is_a_new_version(self):
        for version in (1, 2):
            write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], small_floats(version))})
            self.assertEqual(self.succeed_json("head", "load", "twice", "in", "--create")["weight_version"], version)
        self.succeed("head", "save", "twice", "out")
        self.assertEqual(read_safetensors(self.path("out"))[0][TENSOR][2], small_floats(2))

    def test_a_sharded_model_and_a_named_tensor(self):
        os.mkdir(self.path("model"))
        data = small_floats(4)
        write_safetensors(self.path("model/a.safetensors"), {"other": ("F32", [1], bytes(4))})
        write_safetensors(self.path("model/b.safetensors"), {"x": ("I64", [1], bytes(8)), "wte": ("F32", [V, H], data)})
        with open(self.path("model/model.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump({"weight_map": {"other": "a.safetensors", "x": "b.safetensors", "wte": "b.safetensors"}}, file)
        self.succeed("head", "load", "sharded", "model", "--tensor", "wte", "--create")
        self.succeed("head", "save", "sharded", "out")
        self.assertEqual(read_safetensors(self.path("out"))[0][TENSOR][2], data)
        self.assertIn("it has other, wte, x", self.error_of(NOT_FOUND, "head", "load", "sharded", "model"))
        self.assertIn("I64", self.error_of(INVALID, "head", "load", "sharded", "model", "--tensor", "x"))

    def test_a_tied_head_is_suggested(self):
        write_safetensors(self.path("in"), {"model.embed_tokens.weight": ("F32", [V, H], small_floats(5))})
        self.assertIn("--tensor model.embed_tokens.weight", self.error_of(NOT_FOUND, "head", "load", "x", "in"))

    def test_another_tensor_is_advised_only_where_one_fits(self):
        matrix, foreign = ("F32", [V, H], small_floats(5)), ("F8_E4M3FNUZ", [V, H], bytes(V * H))
        for tensors, code, advice in (({"a": foreign, "row": ("F32", [4], bytes(16))}, NOT_FOUND, None),
                                      ({"a": matrix, "b": foreign}, NOT_FOUND, "--tensor a"),
                                      ({"a": matrix, "b": matrix}, NOT_FOUND, "name one of its tensors with --tensor"),
                                      ({"a": matrix, TENSOR: foreign}, INVALID, None)):
            write_safetensors(self.path("in"), tensors)
            error = self.error_of(code, "head", "load", "x", "in")
            self.assertEqual("--tensor" in error, advice is not None, error)
            self.assertIn(advice or "F8_E4M3FNUZ" * (code == INVALID), error)

    def test_what_does_not_fit_is_refused_and_changes_nothing(self):
        data = small_floats(6)
        write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], data), "row": ("F32", [4], bytes(16)),
                                            "wide": ("F32", [2, 4], bytes(32))})
        with open(self.path("garbage"), "wb") as file:
            file.write(b"not safetensors at all")
        self.assertIn("--create", self.error_of(NOT_FOUND, "head", "load", "absent", "in"))
        self.succeed("head", "load", "fits", "in", "--create")
        error = self.error_of(INVALID, "head", "load", "fits", "in", "--tensor", "wide")
        self.assertIn("2 x 4", error)
        self.assertIn("257 x 33", error)
        self.assertIn("[4]", self.error_of(INVALID, "head", "load", "fits", "in", "--tensor", "row"))
        self.error_of(REFUSED, "head", "load", "fits", "in", "--tensor", "wide", "--create")
        self.assertIn("garbage", self.error_of(INVALID, "head", "load", "fits", "garbage"))
        self.assertIn("no-such-file", self.error_of(NOT_FOUND, "head", "load", "fits", "no-such-file"))
        self.assertEqual(self.head("fits")["weight_version"], 1)
        self.succeed("head", "save", "fits", "out")
        self.assertEqual(read_safetensors(self.path("out"))[0][TENSOR][2], data)

    def test_a_bias_comes_and_goes_with_its_weights(self):
        data, bias = small_floats(10), bias_floats(10)
        write_safetensors(self.path("in"), {BIAS: ("F32", [V], bias), TENSOR: ("F32", [V, H], data)})
        loaded = self.succeed_json("head", "load", "biased", "in", "--create", "--dtype", "bf16")
        self.assertEqual(loaded["bias_tensor"], BIAS)
        self.assertTrue(self.head("biased")["bias"])
        saved = self.succeed_json("head", "save", "biased", "out")
        self.assertEqual((saved["dtype"], saved["bias_tensor"]), ("bfloat16", BIAS))
        self.assertEqual(read_safetensors(self.path("out"))[0],
                         {TENSOR: ("BF16", [V, H], to_bfloat16(data)), BIAS: ("F32", [V], bias)})
        self.assertIn("with its bias", self.succeed("head", "save", "biased", "out", "--bias-name", "b"))
        self.assertEqual(read_safetensors(self.path("out"))[0]["b"], ("F32", [V], bias))

    def test_a_bias_of_any_type_and_name_goes_into_a_head_that_was_made_for_one(self):
        data, bias = small_floats(11), bias_floats(11)
        self.succeed("head", "create", "named", "--vocab", str(V), "--hidden", str(H), "--dtype", "fp32", "--bias")
        for dtype, narrow in (("BF16", to_bfloat16(bias)), ("F16", struct.pack(f"<{V}e", *struct.unpack(f"<{V}f", bias)))):
            write_safetensors(self.path("in"), {"b": (dtype, [V], narrow), TENSOR: ("F32", [V, H], data)})
            self.assertIn("With the bias 'b'", self.succeed("head", "load", "named", "in", "--bias-name", "b"))
            self.succeed("head", "save", "named", "out")
            wide = to_float32(narrow) if dtype == "BF16" else struct.pack(f"<{V}f", *struct.unpack(f"<{V}e", narrow))
            self.assertEqual(read_safetensors(self.path("out"))[0][BIAS], ("F32", [V], wide))

    def test_a_bias_that_is_missing_or_does_not_fit_is_refused(self):
        data, bias = small_floats(12), bias_floats(12)
        write_safetensors(self.path("plain"), {TENSOR: ("F32", [V, H], data)})
        write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], data), BIAS: ("F32", [V], bias),
                                            "short": ("F32", [V - 1], bias[4:])})
        self.succeed("head", "load", "without", "plain", "--create")
        self.succeed("head", "load", "with", "in", "--create")
        self.assertIn(f"no tensor '{BIAS}'", self.error_of(NOT_FOUND, "head", "load", "with", "plain"))
        self.assertIn("[256]", self.error_of(INVALID, "head", "load", "with", "in", "--bias-name", "short"))
        self.error_of(NOT_FOUND, "head", "load", "with", "in", "--bias-name", "no-such-tensor")
        self.assertIn("without a bias", self.error_of(INVALID, "head", "load", "without", "in", "--bias-name", BIAS))
        self.assertIn("'lm_head.bias' was left out", self.succeed("head", "load", "without", "in"))
        self.assertEqual(self.head("with")["weight_version"], 1)

    def test_a_local_file_that_cannot_be_used_is_told_as_one_and_nothing_is_left_of_it(self):
        write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], small_floats(7))})
        self.succeed("head", "load", "unsaved", "in", "--create")
        self.succeed("head", "create", "empty", "--vocab", "8", "--hidden", "4")
        self.make_unusable_files()
        before = sorted(os.listdir(self.folder))
        self.assertIn("head load empty", self.error_of(REFUSED, "head", "save", "empty", "out"))
        self.error_of(NOT_FOUND, "head", "save", "absent", "out")
        self.assertIn("name one", self.error_of(INVALID, "head", "save", "unsaved", ""))
        for path, (run_with, code, words) in UNWRITABLE.items():
            with self.subTest(saved=path):
                error = self.error_of(code, "head", "save", "unsaved", path, preexec_fn=run_with)
                self.assertRegex(error, f"'{path}'.*{words}")
                self.assertNotRegex(error, SERVERS_HINT)
        for path, (code, words) in UNREADABLE.items():
            with self.subTest(loaded=path):
                error = self.error_of(code, "head", "load", "unsaved", path, preexec_fn=obey_modes)
                self.assertIn(f"'{path}'", error)
                self.assertIn(words, error)
                self.assertNotRegex(error, SERVERS_HINT)
        self.assertEqual(sorted(os.listdir(self.folder)), before)
        self.assertEqual(self.head("unsaved")["weight_version"], 1)

    def test_a_terminal_gets_a_bar_that_erases_itself(self):
        write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], small_floats(8))})
        terminal, ours = pty.openpty()
        with Program(LOSSCTL, "head", "load", "watched", "in", "--create", "--json", log=self.path("log"), stderr=ours,
                     stdout=subprocess.PIPE, cwd=self.folder, env=self.environment(LC_ALL="C.UTF-8")) as process:
            os.close(ours)
            text = read_to_end(terminal).decode()
            self.assertEqual(process.wait(), 0)
            result = process.stdout.read()
        self.assertIn("loading watched  ", text)
        self.assertIn("100 %", text)
        self.assertIn("█", text)
        self.assertTrue(text.endswith("\r\033[K"), text)
        self.assertEqual(json.loads(result)["weight_version"], 1)


class Flush(LossctlTest):
    def filled(self, name, dtype="float32"):
        """A head with a gradient: (its bytes, valid tokens)."""
        write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], small_floats(9))})
        self.succeed("head", "load", name, "in", "--create", "--dtype", dtype)
        os.remove(self.path("in"))
        tokens = self.feed(name, 100)
        self.assertEqual(tokens, 85)  # the filler ignores every 7th
        gradient = self.peek(name)
        os.remove(self.path("peek"))
        self.assertTrue(any(gradient))
        return gradient, tokens

    def assert_flushed(self, path, gradient):
        tensors, _ = read_safetensors(self.path(path))
        self.assertEqual(tensors, {GRADIENT: ("F32", [V, H], gradient)})

    def test_the_file_is_the_window_and_the_window_ends(self):
        for dtype in ("float32", "bfloat16"):
            with self.subTest(dtype=dtype):
                name = f"flushed-{dtype}"
                gradient, tokens = self.filled(name, dtype)
                flushed = self.succeed_json("flush", name, "--out", "out")
                norm = math.sqrt(math.fsum(value * value for value in struct.unpack(f"<{V * H}f", gradient)))
                self.assertAlmostEqual(flushed.pop("norm") / norm, 1, places=9)
                self.assertEqual(flushed, {"head": name, "file": "out", "tensor": GRADIENT, "rows": V, "columns": H,
                                           "dtype": "float32", "bytes": V * H * 4, "generation": 1,
                                           "window_tokens": tokens, "non_finite": 0})
                self.assert_flushed("out", gradient)
                head = self.head(name)
                self.assertEqual((head["generation"], head["window_tokens"], head["window_state"]), (2, 0, "open"))

    def test_the_file_holds_the_gradient_of_the_bias_too(self):
        write_safetensors(self.path("in"), {TENSOR: ("F32", [V, H], small_floats(9)), BIAS: ("F32", [V], bias_floats(9))})
        self.succeed("head", "load", "biased", "in", "--create")
        self.feed("biased", 100)
        window = self.peek("biased")
        gradient, bias = window[:V * H * 4], window[V * H * 4:]
        self.assertTrue(any(bias))
        flushed = self.succeed_json("flush", "biased", "--out", "out")
        self.assertEqual(flushed["bias_tensor"], BIAS_GRADIENT)
        norm = math.sqrt(math.fsum(value * value for value in struct.unpack(f"<{V}f", bias)))
        self.assertAlmostEqual(flushed["bias_norm"] / norm, 1, places=9)
        tensors, _ = read_safetensors(self.path("out"))
        self.assertEqual(tensors, {GRADIENT: ("F32", [V, H], gradient), BIAS_GRADIENT: ("F32", [V], bias)})

    def test_an_empty_window_flushes_as_zeros_over_an_old_file(self):
        gradient, _ = self.filled("emptied")
        self.succeed("flush", "emptied", "--out", "out")
        self.assert_flushed("out", gradient)
        text = self.succeed("flush", "emptied", "--out", "out")
        self.assertIn("Flushed generation 2", text)
        self.assertIn("norm 0 over 0 tokens; generation 3 begins", text)
        self.assert_flushed("out", bytes(V * H * 4))

    def test_a_narrower_type_is_rounded_once(self):
        gradient, _ = self.filled("narrowed")
        text = self.succeed("flush", "narrowed", "--out", "out", "--dtype", "bf16")
        self.assertIn("257 x 33 bfloat16", text)
        self.assertEqual(read_safetensors(self.path("out"))[0], {GRADIENT: ("BF16", [V, H], to_bfloat16(gradient))})

    def test_whatever_fails_leaves_the_window_whole(self):
        gradient, tokens = self.filled("kept")
        self.make_unusable_files()
        before = sorted(os.listdir(self.folder))
        for path, (run_with, code, words) in UNWRITABLE.items():
            with self.subTest(out=path):
                error = self.error_of(code, "flush", "kept", "--out", path, preexec_fn=run_with)
                self.assertRegex(error, f"'{path}'.*{words}")
                self.assertNotRegex(error, SERVERS_HINT)
                if code == EXHAUSTED:
                    self.assertIn("the window is whole", error)
                self.assertEqual(sorted(os.listdir(self.folder)), before)
                head = self.head("kept")
                self.assertEqual((head["generation"], head["window_tokens"], head["window_state"]), (1, tokens, "open"))
        self.error_of(NOT_FOUND, "flush", "absent", "--out", "out")
        self.succeed("flush", "kept", "--out", "out")
        self.assert_flushed("out", gradient)

    def test_the_window_still_accumulates_after_a_flush_that_failed(self):
        gradient, tokens = self.filled("resumed")
        self.error_of(EXHAUSTED, "flush", "resumed", "--out", "out", preexec_fn=limit_file_size(16384))
        self.assertEqual(self.feed("resumed", 100), tokens)
        both = self.peek("resumed")
        # The same tokens with the same weights again: twice the gradient, but for the order of additions.
        once, twice = (struct.unpack(f"<{V * H}f", data) for data in (gradient, both))
        error = math.sqrt(math.fsum((b - 2 * a) ** 2 for a, b in zip(once, twice)))
        self.assertLess(error, 1e-6 * math.sqrt(math.fsum(b * b for b in twice)))
        self.assertEqual(self.succeed_json("flush", "resumed", "--out", "out")["window_tokens"], 2 * tokens)
        self.assert_flushed("out", both)

    def test_a_flush_that_was_left_frozen_is_finished_by_the_next(self):
        gradient, tokens = self.filled("frozen")
        self.filler("frozen", "freeze")
        self.assertEqual(self.head("frozen")["window_state"], "frozen")
        self.assertEqual(self.succeed_json("flush", "frozen", "--out", "out")["window_tokens"], tokens)
        self.assert_flushed("out", gradient)

    def test_a_flush_whose_client_is_gone_is_aborted_and_nothing_is_lost(self):
        gradient, tokens = self.filled("stuck")
        self.assertIsNone(self.head("stuck")["flush_id"])
        self.assertIn("open, generation 1", self.error_of(REFUSED, "flush", "stuck", "--abort"))
        self.filler("stuck", "freeze")
        head = self.head("stuck")
        self.assertGreater(head["flush_seconds"], 0)
        status, = (head for head in self.succeed_json("status")["heads"] if head["name"] == "stuck")
        self.assertEqual(status["flush_id"], head["flush_id"])
        for command in (["status"], ["head", "list"]):
            self.assertIn(f"Flush {head['flush_id']} has held the window of 'stuck' for", self.succeed(*command))
        # Another flush's name ends nothing.
        error = self.error_of(REFUSED, "flush", "stuck", "--abort", "--flush-id", "0" * 32)
        self.assertIn("committed or aborted already", error)
        self.assertEqual(self.head("stuck")["window_state"], "frozen")
        self.assertEqual(self.succeed_json("flush", "stuck", "--abort"), {
            "head": "stuck", "flush_id": head["flush_id"], "aborted": True, "generation": 1, "window_tokens": tokens})
        # Asked once more by its name, it answers the same; without a name there is none to abort.
        again = self.succeed("flush", "stuck", "--abort", "--flush-id", head["flush_id"])
        self.assertIn(f"Generation 1 is open, with {tokens} tokens", again)
        self.error_of(REFUSED, "flush", "stuck", "--abort")
        self.assertEqual(self.peek("stuck"), gradient)
        self.succeed("flush", "stuck", "--out", "out")
        self.assert_flushed("out", gradient)
        self.error_of(REFUSED, "flush", "stuck", "--abort", "--flush-id", head["flush_id"])

    def test_a_flush_goes_to_a_file_or_is_aborted_but_not_both(self):
        self.assertIn("--out FILE or --abort", self.error_of(USAGE, "flush", "any"))
        self.error_of(USAGE, "flush", "any", "--abort", "--out", "out")
        self.error_of(USAGE, "flush", "any", "--out", "out", "--flush-id", "x")

    def test_killed_at_any_moment_it_can_be_run_again(self):
        gradient, _ = self.filled("killed")
        for delay in (0.0, 0.02, 0.03, 0.04, 0.06, 0.1):
            with Program(LOSSCTL, "flush", "killed", "--out", "out", log=os.devnull, cwd=self.folder, env=self.environment()) as process:
                time.sleep(delay)
                process.signal(signal.SIGKILL)
                process.wait()  # it may have ended before
            if os.path.exists(self.path("out")):
                break  # it was done, or the file is there and the window not yet ended
        if self.head("killed")["generation"] == 1:
            self.succeed("flush", "killed", "--out", "out")
        self.assert_flushed("out", gradient)
        self.assertEqual(self.head("killed")["generation"], 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
