#!/usr/bin/python3
"""lossctl's commands, for people and for programs, and each of its exit codes.

usage: lossctl_commands_test.py LOSSD LOSSCTL WINDOW_FILLER
"""
import json
import re
import socket
import struct
import unittest

from lossctl_harness import (EXHAUSTED, FAILED, INVALID, NOT_FOUND, REFUSED, UNREACHABLE, USAGE, LossctlTest,
                             read_safetensors, write_safetensors)

# Every command that talks to the server, with arguments that are right.
SERVER_COMMANDS = [
    ["status"], ["health"], ["memory"], ["head", "create", "x", "--vocab", "8", "--hidden", "4"], ["head", "list"],
    ["head", "delete", "x"], ["head", "save", "x", "x.safetensors"], ["flush", "x", "--out", "x.safetensors"],
    ["checkpoint", "save", "x", "t"], ["checkpoint", "restore", "x"], ["checkpoint", "list"],
    ["step", "x", "--lr", "1"], ["gradient-stats", "x"], ["head", "copy", "x", "y"],
    ["head", "blend", "x", "y", "--decay", "0.5"], ["head", "park", "x"],
]
ALL_COMMANDS = [[], ["status"], ["health"], ["memory"], ["head"], ["head", "create"], ["head", "list"],
                ["head", "delete"], ["head", "copy"], ["head", "blend"], ["head", "park"], ["head", "load"], ["head", "save"], ["flush"], ["step"], ["gradient-stats"], ["checkpoint"],
                ["checkpoint", "save"], ["checkpoint", "restore"], ["checkpoint", "list"], ["checkpoint", "delete"],
                ["completion"]]


class StatusAndMemory(LossctlTest):
    def test_status_shows_the_server_and_its_heads(self):
        self.succeed("head", "create", "seen", "--vocab", "1000", "--hidden", "16")
        status = self.succeed_json("status")
        self.assertEqual(set(status), {
            "server", "version", "incarnation", "state", "device", "device_description", "uptime_seconds",
            "chunks_applied", "tokens_applied", "queued_chunks", "features", "heads"})
        self.assertEqual(f"lossctl {status['version']}\n", self.succeed("--version"))
        self.assertEqual(status["server"], self.server.target)
        self.assertEqual(status["state"], "serving")
        self.assertIn("seen", [head["name"] for head in status["heads"]])
        text = self.succeed("status")
        self.assertIn(f"at {self.server.target}: serving", text)
        self.assertRegex(text, r"(?m)^seen +1,000 +16 +bfloat16 +none +open, generation 1 +0 +0 ")

    def test_memory_shows_every_purpose_of_every_head(self):
        created = self.succeed_json("head", "create", "big", "--vocab", "4096", "--hidden", "64", "--dtype", "fp32")
        memory = self.succeed_json("memory")
        self.assertEqual(memory["heads"]["big"], created["memory"])
        self.assertEqual(created["memory"]["gradient"], 4096 * 64 * 4)
        self.assertEqual(memory["limit_bytes"], 402653184)
        held = sum(sum(items.values()) for items in [*memory["heads"].values(), memory["shared"]])
        self.assertEqual(memory["reserved_bytes"], held)
        self.assertGreaterEqual(memory["process_peak_bytes"], memory["process_resident_bytes"])

        text = self.succeed("memory")
        self.assertIn("of 384.0 MiB", text)
        self.assertRegex(text, r"(?m)^big +weights +1\.0 MiB  #*\.*$")
        self.assertRegex(text, r"(?m)^ +gradient +1\.0 MiB  #*\.*$")

    def test_bars_are_unicode_only_where_the_locale_is(self):
        self.assertNotIn("█", self.succeed("memory"))
        self.assertIn("█", self.succeed("memory", LC_ALL="C.UTF-8"))


class Health(LossctlTest):
    def test_a_server_that_takes_work_is_exit_code_0(self):
        self.assertEqual(self.succeed("health"), "serving\n")
        self.assertEqual(self.succeed_json("health"),
                         {"server": self.server.target, "service": "", "status": "SERVING"})

    def test_a_service_that_is_not_there_is_exit_code_3(self):
        self.assertIn("knows no service 'nonsense'", self.error_of(NOT_FOUND, "health", "--service", "nonsense"))


class Proxies(LossctlTest):
    VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
    NOBODY = "http://user:secret@127.0.0.1:1"

    def test_loopback_never_goes_by_one(self):
        for variable in self.VARIABLES:
            for command in ("status", "health"):
                with self.subTest(variable=variable, command=command):
                    self.succeed(command, **{variable: self.NOBODY})

    def test_the_variable_is_named_where_a_connection_by_one_fails(self):
        for variable in self.VARIABLES:
            for command in ("status", "health"):
                with self.subTest(variable=variable, command=command):
                    message = self.error_of(UNREACHABLE, command, "--server", "h.invalid:1", "--timeout", "1",
                                            **{variable: self.NOBODY})
                    self.assertIn(f"the proxy that {variable} names", message)
                    self.assertNotIn("secret", message)


class Heads(LossctlTest):
    def test_create_says_what_it_reserved_and_may_be_repeated(self):
        for dtype, given in [("bfloat16", None), ("float32", "float32"), ("bfloat16", "bf16"), ("float32", "fp32")]:
            command = ["head", "create", f"made-{given}", "--vocab", "1000", "--hidden", "64"]
            command += ["--dtype", given] if given else []
            for _ in range(2):
                text = self.succeed(*command)
                self.assertIn(f"1,000 x 64 {dtype}", text)
                self.assertIn(f"lossctl head load made-{given}", text)
                head = self.succeed_json(*command)
            self.assertEqual([head[key] for key in ("vocab_size", "hidden_size", "dtype", "weight_version")],
                             [1000, 64, dtype, 0])

    def test_what_belongs_to_the_weights_is_kept_and_shown(self):
        command = ["head", "create", "capped", "--vocab", "10", "--hidden", "8", "--softcap", "30", "--logit_scale", "0.5"]
        self.assertIn(", logit scale 0.5, softcap 30, frozen, ", self.succeed(*command, "--frozen"))
        head = self.succeed_json(*command, "--frozen")
        self.assertEqual([head[key] for key in ("logit_scale", "softcap", "frozen", "class_weights")], [0.5, 30, True, False])
        self.assertNotIn("gradient", head["memory"])
        self.assertRegex(self.succeed("head", "list"), r"(?m)^capped .* none \(frozen\) .*  logit scale 0\.5, softcap 30$")
        self.assertIn("asked for [10, 8] bfloat16, logit_scale 0.5, softcap 30", self.error_of(REFUSED, *command))
        self.assertIn("softcap", self.error_of(INVALID, "head", "create", "bad", "--vocab", "10", "--hidden", "8", "--softcap", "-1"))
        self.succeed("head", "delete", "capped")
        self.assertIn(", bias, ", self.succeed("head", "create", "biased", "--vocab", "10", "--hidden", "8", "--bias"))
        self.assertTrue(self.head("biased")["bias"])
        self.assertRegex(self.succeed("head", "list"), r"(?m)^biased .*  bias( |$)")
        self.assertIn("asked for [10, 8] bfloat16", self.error_of(REFUSED, "head", "create", "biased", "--vocab", "10", "--hidden", "8"))
        self.succeed("head", "delete", "biased")

    def test_fixed_segments_are_kept_and_shown(self):
        command = ["head", "create", "fixed", "--vocab", "10", "--hidden", "8"]
        self.assertIn(", fixed segments, ", self.succeed(*command, "--fixed-segments"))
        self.assertTrue(self.head("fixed")["fixed_segments"])
        self.assertRegex(self.succeed("head", "list"), r"(?m)^fixed .*  fixed segments( |$)")
        self.assertIn("exists as [10, 8] bfloat16, fixed_segments; asked for", self.error_of(REFUSED, *command))
        self.succeed("head", "delete", "fixed")
        self.assertFalse(self.succeed_json(*command)["fixed_segments"])
        self.succeed("head", "delete", "fixed")

    def test_an_optimizer_is_kept_and_shown(self):
        sizes = ["--vocab", "10", "--hidden", "8"]
        command = ["head", "create", "adamed", *sizes, "--optimizer", "adamw", "--weight-decay", "0.1", "--beta2", "0.95"]
        text = self.succeed(*command, "--master-weights", "--double-buffer")
        self.assertIn("AdamW (weight decay 0.1, betas 0.9 and 0.95, eps 1e-08), fp32 master, two gradients", text)
        head = self.head("adamed")
        self.assertEqual(head["optimizer"], {"kind": "adamw", "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
                                             "maximize": False})
        self.assertEqual([head[key] for key in ("optimizer_steps", "master_weights", "double_buffer")], [0, True, True])
        listed = self.succeed("head", "list")
        self.assertRegex(listed, r"(?m)^HEAD .*  LOSS  OPTIMIZER$")
        self.assertRegex(listed, r"(?m)^adamed .*generation 1, two gradients  .*  AdamW \(.*\), fp32 master$")
        self.assertIn("AdamW (betas 0.9, 0.95", self.error_of(REFUSED, *command))
        self.succeed("head", "delete", "adamed")
        self.assertIn("SGD (weight decay 0, Nesterov's momentum 0.9)",
                      self.succeed("head", "create", "sgd", *sizes, "--optimizer", "sgd", "--momentum", "0.9", "--nesterov"))
        self.assertIsNone(self.succeed_json("head", "create", "plain", *sizes)["optimizer"])
        for arguments, message in ((["--optimizer", "adam", "--beta1", "1"], "optimizer.beta1 is 1"),
                                   (["--optimizer", "sgd", "--nesterov"], "optimizer.nesterov"),
                                   (["--optimizer", "sgd", "--frozen"], "frozen is true"),
                                   (["--dtype", "fp32", "--master-weights"], "their own master")):
            self.assertIn(message, self.error_of(INVALID, "head", "create", "bad", *sizes, *arguments))
        self.assertIn("--optimizer", self.error_of(USAGE, "head", "create", "bad", *sizes, "--momentum", "0.9"))
        self.assertIn("rmsprop", self.error_of(USAGE, "head", "create", "bad", *sizes, "--optimizer", "rmsprop"))
        for name in ("sgd", "plain"):
            self.succeed("head", "delete", name)

    def test_a_head_is_copied_and_blended_at_the_server(self):
        def weights(head):
            self.succeed("head", "save", head, self.path(head))
            (_, _, data), = read_safetensors(self.path(head))[0].values()
            return struct.unpack("<4f", data)

        write_safetensors(self.path("w"), {"lm_head.weight": ("F32", [2, 2], struct.pack("<4f", 1, 2, 3, 4))})
        self.succeed("head", "load", "source", self.path("w"), "--create", "--optimizer", "adam")
        text = self.succeed("head", "copy", "source", "kept", "--frozen")
        self.assertIn("Head 'kept' has the weights of 'source', version 1: 2 x 2 float32, frozen, ", text)
        copy = self.succeed_json("head", "copy", "source", "branch")
        self.assertEqual([copy[key] for key in ("frozen", "weight_version", "copied_version")], [False, 1, 1])
        self.assertEqual(copy["optimizer"]["kind"], "adam")
        write_safetensors(self.path("w"), {"lm_head.weight": ("F32", [2, 2], struct.pack("<4f", 2, 4, 6, 8))})
        self.succeed("head", "load", "source", self.path("w"))
        self.assertEqual(weights("kept"), (1, 2, 3, 4))
        self.assertEqual(self.succeed("head", "blend", "kept", "source", "--decay", "0.5"),
                         "Blended 'source' into 'kept': its weights are version 2.\n")
        self.assertEqual(weights("kept"), (1.5, 3, 4.5, 6))
        blended = self.succeed_json("head", "blend", "kept", "source", "--decay", "0", "--target-version", "2")
        self.assertEqual(blended, {"head": "kept", "source": "source", "weight_version": 3})
        self.assertEqual(weights("kept"), (2, 4, 6, 8))
        self.assertIn("choose another name", self.error_of(REFUSED, "head", "copy", "source", "kept"))
        self.assertIn("head list", self.error_of(NOT_FOUND, "head", "copy", "stranger", "other"))
        self.assertIn("head list", self.error_of(NOT_FOUND, "head", "blend", "kept", "stranger", "--decay", "0.5"))
        self.assertIn("source_version is 1", self.error_of(REFUSED, "head", "copy", "source", "other",
                                                           "--source-version", "1"))
        self.assertIn("decay is 2", self.error_of(INVALID, "head", "blend", "kept", "source", "--decay", "2"))
        self.error_of(USAGE, "head", "blend", "kept", "source")
        for name in ("source", "kept", "branch"):
            self.succeed("head", "delete", name)

    def test_a_head_is_parked_until_it_is_used(self):
        write_safetensors(self.path("w"), {"lm_head.weight": ("F32", [2, 2], struct.pack("<4f", 1, 2, 3, 4))})
        self.succeed("head", "load", "aside", self.path("w"), "--create")
        self.assertEqual(self.succeed_json("head", "park", "aside")["parked_bytes"], 16)
        self.assertIn("Parked head 'aside': it takes 16 B of the host's memory, and none of the device's, until",
                      self.succeed("head", "park", "aside"))
        self.assertRegex(self.succeed("head", "list"), r"(?m)^aside +2 +2 +float32 +version 1 .* parked, 16 B")
        self.succeed("head", "save", "aside", self.path("saved"))
        self.assertNotIn("parked", self.succeed("head", "list"))
        self.assertIn("head list", self.error_of(NOT_FOUND, "head", "park", "stranger"))
        self.succeed("head", "park", "aside")
        self.succeed("head", "delete", "aside")

    def test_a_step_consumes_the_gradient_once(self):
        write_safetensors(self.path("w"), {"lm_head.weight": ("F32", [50, 8], bytes(50 * 8 * 4))})
        self.succeed("head", "load", "stepped", "w", "--create", "--optimizer", "sgd")
        tokens = self.feed("stepped", 21)
        stats = self.succeed_json("gradient-stats", "stepped", "--gradient-scale", "0.5")
        self.assertEqual((stats["generation"], stats["window_tokens"], stats["non_finite"]), (1, tokens, 0))
        self.assertIn(f"over {tokens} tokens", self.succeed("gradient-stats", "stepped"))
        step = self.succeed_json("step", "stepped", "--lr", "0.1", "--gradient-scale", "0.5", "--generation", "1")
        self.assertEqual((step["generation"], step["next_generation"], step["weight_version"], step["step"], step["skipped"],
                          step["window_tokens"]), (1, 2, 2, 1, False, tokens))
        self.assertAlmostEqual(step["norm"], stats["norm"], delta=1e-6 * stats["norm"])
        self.assertEqual(self.head("stepped")["optimizer_steps"], 1)
        self.assertRegex(self.succeed("head", "list"), r"(?m)^stepped .* version 2, 1 step ")
        # An answer that was lost is asked for again, when the marks are those of the next window.
        again = self.succeed_json("step", "stepped", "--lr", "0.1", "--gradient-scale", "0.5", "--generation", "1")
        self.assertEqual(again, step)
        error = self.error_of(REFUSED, "step", "stepped", "--lr", "0.2", "--gradient-scale", "0.5", "--generation", "1")
        self.assertIn("a step of generation 1 was applied with learning_rate", error)
        self.assertNotIn("nothing changed", error)
        self.assertEqual(self.head("stepped")["generation"], 2)
        skipped = self.succeed("step", "stepped", "--lr", "0.1")
        self.assertIn("Skipped the step of generation 2 of head 'stepped': no token is in its window", skipped)
        self.assertEqual(self.head("stepped")["optimizer_steps"], 1)
        self.assertIn("learning_rate is -1", self.error_of(INVALID, "step", "stepped", "--lr", "-1"))
        self.assertIn("beta1 is set", self.error_of(INVALID, "step", "stepped", "--lr", "1", "--beta1", "0.5"))
        self.succeed("head", "delete", "stepped")
        self.succeed("head", "load", "plain", "w", "--create")
        error = self.error_of(REFUSED, "step", "plain", "--lr", "1")
        self.assertIn("without an optimizer", error)
        self.assertNotIn("run it again", error)
        self.succeed("head", "delete", "plain")
        self.succeed("head", "load", "icy", "w", "--create", "--frozen")
        for command in (["step", "icy", "--lr", "1"], ["gradient-stats", "icy"], ["flush", "icy", "--out", self.path("g")]):
            error = self.error_of(REFUSED, *command)
            self.assertIn("frozen", error)
            self.assertNotIn("still sending", error)
        self.succeed("head", "delete", "icy")
        self.succeed("head", "create", "empty", "--vocab", "10", "--hidden", "8", "--optimizer", "sgd")
        error = self.error_of(REFUSED, "step", "empty", "--lr", "1")
        self.assertIn("no weights yet", error)
        self.assertNotIn("run it again", error)
        self.succeed("head", "delete", "empty")

    def test_a_name_that_is_taken_by_another_shape_is_refused(self):
        self.succeed("head", "create", "taken", "--vocab", "10", "--hidden", "8")
        error = self.error_of(REFUSED, "head", "create", "taken", "--vocab", "11", "--hidden", "8")
        self.assertIn("taken", error)
        self.assertIn("choose another name", error)
        self.assertEqual(self.head("taken")["vocab_size"], 10)

    def test_a_head_that_does_not_fit_is_out_of_resources(self):
        error = self.error_of(EXHAUSTED, "head", "create", "huge", "--vocab", "131072", "--hidden", "4096")
        self.assertIn("lossctl memory", error)
        self.assertNotIn("huge", self.succeed("head", "list"))

    def test_a_name_the_server_does_not_accept_is_invalid(self):
        self.assertIn("name", self.error_of(INVALID, "head", "create", "a b", "--vocab", "1", "--hidden", "1"))

    def test_list_and_delete(self):
        for name in ("one", "two"):
            self.succeed("head", "create", name, "--vocab", "10", "--hidden", "8")
        table = self.succeed("head", "list")
        self.assertRegex(table, r"(?m)^HEAD +VOCAB +HIDDEN")
        self.assertRegex(table, r"(?m)^one ")
        self.assertIn("Deleted head 'one'", self.succeed("head", "delete", "one"))
        self.assertEqual(self.succeed_json("head", "delete", "two"), {"deleted": "two"})
        left = [head["name"] for head in self.succeed_json("head", "list")["heads"]]
        self.assertFalse({"one", "two"} & set(left))
        error = self.error_of(NOT_FOUND, "head", "delete", "one")
        self.assertEqual(error.count("lossctl head list"), 1, error)
        self.assertNotIn("CreateHead", error)

    def test_a_gradient_is_only_deleted_on_demand(self):
        write_safetensors(self.path("w"), {"lm_head.weight": ("F32", [50, 8], bytes(50 * 8 * 4))})
        self.succeed("head", "load", "held", "w", "--create")
        tokens = self.feed("held", 21)
        error = self.error_of(REFUSED, "head", "delete", "held")
        self.assertIn("lossctl flush held", error)
        self.assertIn("--discard-gradient", error)
        self.assertEqual(self.head("held")["window_tokens"], tokens)
        self.succeed("head", "delete", "held", "--discard-gradient")
        self.error_of(NOT_FOUND, "head", "delete", "held", "--discard-gradient")


class CommandLine(LossctlTest):
    def test_wrong_command_lines_are_usage_errors_that_name_the_help_to_read(self):
        for arguments, message, where in [
                ([], "subcommand is required", "lossctl --help"),
                (["head"], "subcommand is required", "lossctl head --help"),
                (["head", "remove"], "unknown command or option 'remove'", "lossctl head --help"),
                (["statsu"], "unknown command or option 'statsu'", "lossctl --help"),
                (["status", "extra"], "extra", "lossctl status --help"),
                (["status", "--verbose"], "--verbose", "lossctl status --help"),
                (["head", "create"], "required", "lossctl head create --help"),
                (["head", "create", "x", "--vocab", "8"], "--hidden", "lossctl head create --help"),
                (["head", "create", "x", "--vocab", "0", "--hidden", "4"], "'0' is not a whole number above 0", "head create --help"),
                (["head", "create", "x", "--vocab", "-3", "--hidden", "4"], "'-3' is not a whole number", "create --help"),
                (["head", "create", "x", "--vocab", "8.5", "--hidden", "4"], "'8.5' is not a whole number", "head create --help"),
                (["head", "create", "x", "--vocab", "9" * 20, "--hidden", "4"], "9" * 20, "head create --help"),
                (["head", "create", "x", "--vocab", "8", "--hidden", "4", "--dtype", "int8"], "int8", "create --help"),
                (["head", "load", "x"], "PATH", "lossctl head load --help"),
                (["head", "load", "x", "y", "--dtype", "float32"], "--create", "lossctl head load --help"),
                (["head", "load", "x", "y", "--softcap", "30"], "--create", "lossctl head load --help"),
                (["head", "load", "x", "y", "--frozen"], "--create", "lossctl head load --help"),
                (["flush", "x"], "--out", "lossctl flush --help"),
                (["step", "x"], "--lr", "lossctl step --help"),
                (["head", "load", "x", "y", "--optimizer", "sgd"], "--create", "lossctl head load --help"),
                (["status", "--timeout", "0"], "'0' is not a number above 0", "lossctl status --help"),
                (["health", "--timeout", "1e10"], "'1e10' is not a number above 0 and at most 1e9", "lossctl health --help"),
                (["completion", "tcsh"], "tcsh", "lossctl completion --help"),
        ]:
            with self.subTest(arguments=arguments):
                error = self.error_of(USAGE, *arguments)
                self.assertIn(message, error)
                self.assertIn(where, error)

    def test_every_help_teaches(self):
        for command in ALL_COMMANDS:
            with self.subTest(command=command):
                text = self.succeed(*command, "--help")
                self.assertIn(" ".join(["Usage: lossctl", *command]), text)
                if command != ["head"]:
                    self.assertIn("Examples:\n  ", text)
                if command and command != ["completion"]:
                    self.assertIn("--server", text)
        codes = dict(re.findall(r"(?m)^  ([0-9]) (.*)$", self.succeed("--help")))
        self.assertEqual(sorted(codes), list("01234567"))

    def test_options_stand_before_or_behind_the_command(self):
        for arguments in (["--json", "status"], ["status", "--json"],
                          ["--server", self.server.target, "--json", "head", "list"],
                          ["head", "--json", "list", "--server", self.server.target]):
            with self.subTest(arguments=arguments):
                json.loads(self.succeed(*arguments))

    def test_the_option_wins_over_the_environment(self):
        self.succeed("status", "--server", self.server.target, LOSSD_SERVER="127.0.0.1:1")
        self.error_of(UNREACHABLE, "status", "--server", "127.0.0.1:1", "--timeout", "0.2")
        self.error_of(UNREACHABLE, "status", "--timeout", "0.2", LOSSD_SERVER="127.0.0.1:1")

    def test_a_path_is_not_an_address(self):
        for path in ("/usr/bin/lossd", "build/bin/lossd", "./lossd"):
            with self.subTest(path=path):
                self.assertIn("LOSSD_BINARY", self.error_of(INVALID, "status", LOSSD_SERVER=path))

    def test_a_result_that_cannot_be_printed_is_a_failure(self):
        for command in (["status"], ["health", "--json"], ["completion", "bash"], ["head", "save", "--help"], ["--version"]):
            with self.subTest(command=command), open("/dev/full", "w", encoding="utf-8") as full:
                result = self.lossctl(*command, stdout=full)
                self.assertEqual(result.code, FAILED, result)
                self.assertIn("cannot be printed: No space left on device", result.err)
                if "--json" in command:
                    self.assertEqual(json.loads(result.err)["error"]["exit_code"], FAILED)

    def test_credentials_that_cannot_be_read_are_named(self):
        self.make_unusable_files()
        for option in ("--token_file", "--tls_ca"):
            for path in ("nowhere", "dir", "plain/file"):
                with self.subTest(option=option, path=path):
                    error = self.error_of(INVALID, "status", option, path)
                    self.assertRegex(error, f"{option[2:]}: .*'{path}'.*(this user may read|a regular file)")


class Unreachable(LossctlTest):
    def test_no_server_there(self):
        with socket.socket() as taken:  # bound, but nobody listens
            taken.bind(("127.0.0.1", 0))
            nobody = f"127.0.0.1:{taken.getsockname()[1]}"
            for command in SERVER_COMMANDS:
                with self.subTest(command=command):
                    error = self.error_of(UNREACHABLE, *command, "--server", nobody, "--timeout", "0.2")
                    self.assertIn(f"is lossd running at '{nobody}'", error)

    def test_a_server_that_never_answers(self):
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            self.error_of(UNREACHABLE, "status", "--server", f"127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.5")


if __name__ == "__main__":
    unittest.main(verbosity=2)
