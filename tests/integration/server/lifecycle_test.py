#!/usr/bin/python3
"""The server as a process: flags, configuration, signals, exit statuses, log lines."""
import contextlib
import fcntl
import functools
import json
import os
import queue
import re
import select
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
import unittest
import unittest.mock
import urllib.error
import urllib.request

import grpc
import numpy as np
import programs
from lossd.v1 import gradient_pb2, gradient_pb2_grpc, head_pb2, head_pb2_grpc, loss_pb2_grpc
from lossd_server import LossdServer, free_port, read_metrics
from standard_services import NOT_SERVING, SERVING, health
from waiting import wait_until

from streaming import OPTIONS, chunk_request, create_head, open_session, start_request

BINARY = sys.argv.pop(1)
with open(BINARY, "rb") as program:
    SANITIZED = re.search(rb"__[at]san_init", program.read()) is not None


run = functools.partial(programs.run, BINARY)


def listens(address):
    host, port = address.split(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == 0


class Usage(unittest.TestCase):
    def test_help_teaches_every_flag_and_names_no_folder_of_the_build_machine(self):
        text = run("--help").stdout
        for flag in ("listen", "metrics_listen", "device", "workspace_bytes", "max_chunk_bytes", "config"):
            self.assertIn(f"--{flag} ", text)
        self.assertNotIn(os.getcwd(), text)
        self.assertIn("from server/startup/options.cc", text)

    def test_who_asks_for_help_gets_it_and_made_no_mistake(self):
        for flag in ("--help", "-h"):
            done = run(flag)
            self.assertEqual((done.returncode, done.stderr), (0, ""), flag)
            self.assertEqual(done.stdout, run("--help").stdout)
        self.assertEqual(run("--nonsense", "--help").returncode, 2)
        self.assertEqual(run("--version").returncode, 0)

    def test_a_wrong_flag_is_named_with_what_it_may_be_and_exits_with_2(self):
        for flag, words in [("--device=gpu9", ("--device", "'gpu9'", "cpu")),
                            ("--workspace_bytes=5", ("--workspace_bytes", "5", "1048576")),
                            ("--batching_window=2s", ("--batching_window", "2s", "1s")),
                            ("--session_credit_bytes=8192", ("--session_credit_bytes", "8192", "33554432")),
                            ("--staging_bytes=8192", ("--staging_bytes", "8192", "33554432")),
                            ("--parking_bytes=9000T", ("0 bytes beside --parking_bytes", "33554432", "--lane_credit_bytes")),
                            ("--head_quota_bytes=-1", ("--head_quota_bytes", "-1", "0")),
                            ("--head_staging_bytes=8192", ("--head_staging_bytes", "8192", "33554432")),
                            ("--weights_dir=/nonexistent", ("--weights_dir", "/nonexistent", "folder")),
                            ("--log_format=xml", ("--log_format", "'xml'", "json")),
                            ("--listen=127.0.0.1:99999", ("--listen", "99999", "65535")),
                            ("--metrics_listen=localhost", ("--metrics_listen", "'localhost'", "host:port")),
                            ("--tokens=", ("tokens", "name a file")),
                            ("--tls_client_ca=", ("tls_client_ca", "name a file")),
                            ("--config=", ("config", "name a file")),
                            ("--metrics_listen=127.0.0.1:1,127.0.0.1:2", ("--metrics_listen", "127.0.0.1:2'", "one address")),
                            ("--health_listen=127.0.0.1:1,127.0.0.1:2", ("--health_listen", "127.0.0.1:2'", "one address")),
                            ("--metrics_listen=a:b:1", ("--metrics_listen", "'a:b:1'", "one address")),
                            ("--metrics_hosts=a.example:9464", ("--metrics_hosts", "a.example:9464", "without a port")),
                            ("--drain_timeout=-1s", ("--drain_timeout", "-1s", "at least 0")),
                            ("--session_lease=-1m", ("--session_lease", "-1m", "1s")),
                            ("--batching_window=-1ms", ("--batching_window", "-1ms", "0 to 1s")),
                            ("--region_attach_timeout=-1s", ("--region_attach_timeout", "-1s", "1s")),
                            ("--max_connection_age=-1s", ("--max_connection_age", "-1s", "1s")),
                            ("--drain_timeout=30", ("drain_timeout", "'30'")),
                            ("--max_heads=many", ("max_heads", "'many'")),
                            ("--staging_bytes=2X", ("staging_bytes", "'2X'", "2G")),
                            ("--staging_bytes=-2G", ("--staging_bytes", "-2147483648")),
                            ("--staging_bytes=99999999T", ("staging_bytes", "'99999999T'")),
                            ("--no_such_flag=1", ("no_such_flag", "lossd --help")),
                            ("--config=/nonexistent.json", ("--config", "/nonexistent.json"))]:
            result = run(flag)
            self.assertEqual(result.returncode, 2, flag)
            for word in words:
                self.assertIn(word, result.stderr)

    def test_a_config_that_is_a_folder_is_an_error_that_says_so(self):
        with tempfile.TemporaryDirectory() as folder:
            result = run(f"--config={folder}")
            self.assertEqual(result.returncode, 2)
            self.assertIn(f"cannot read {folder}", result.stderr)

    def test_a_port_file_never_replaces_what_is_no_file(self):
        with tempfile.TemporaryDirectory() as folder:
            pipe = os.path.join(folder, "pipe")
            os.mkfifo(pipe)
            result = run("--listen=127.0.0.1:0", "--metrics_listen=", f"--port_file={pipe}")
            self.assertEqual(result.returncode, 1)
            self.assertIn("must be a regular file", result.stderr)
            self.assertEqual(os.listdir(folder), ["pipe"])
            self.assertTrue(stat.S_ISFIFO(os.stat(pipe).st_mode))

    def test_whoever_finds_the_port_file_finds_the_start_in_the_log(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
            address = f"127.0.0.1:{free_port()}"
            log, full = os.pipe()
            held.callback(os.close, log)
            filling = os.write(full, b"\n" * fcntl.fcntl(full, fcntl.F_GETPIPE_SZ))  # its first line has to wait
            server = LossdServer(BINARY, "--device=cpu", f"--listen={address}", folder=folder, stderr=full)
            held.callback(server.close)
            server.begin()
            os.close(full)
            wait_until(lambda: listens(address), f"a server at {address}")
            time.sleep(0.2)  # in which a file that does not wait for the line would appear
            self.assertFalse(server.port_file().exists())
            while filling > 0:
                filling -= len(os.read(log, filling))
            self.assertIn(b" serving ", os.read(log, 1 << 16))

    def test_a_log_that_nothing_reads_stops_neither_calls_nor_the_drain(self):
        log, full = os.pipe()
        with contextlib.ExitStack() as held:
            held.callback(os.close, log)
            os.write(full, b"\n" * fcntl.fcntl(full, fcntl.F_GETPIPE_SZ))
            address = f"127.0.0.1:{free_port()}"
            server = LossdServer(BINARY, "--device=cpu", f"--listen={address}", stderr=full)
            held.callback(server.close)
            server.begin()
            os.close(full)
            wait_until(lambda: listens(address), f"a server at {address}")
            with grpc.insecure_channel(address) as channel:
                for number in range(50):
                    create_head(channel, f"head{number}", 8, 4)
            self.assertEqual(server.stop(), 0)

    def test_standard_files_that_are_closed_become_no_other_files(self):
        for closed in ([2], [1, 2], [0, 1, 2]):
            with self.subTest(closed), tempfile.TemporaryDirectory() as folder:
                wrapper = os.path.join(folder, "lossd")
                with open(wrapper, "w", encoding="utf-8") as file:
                    file.write(f'#!/bin/sh\nexec {os.path.abspath(BINARY)} "$@" {" ".join(f"{each}>&-" for each in closed)}\n')
                os.chmod(wrapper, 0o755)
                with LossdServer(wrapper, "--device=cpu", f"--checkpoint_dir={folder}/checkpoints") as server:
                    for each in closed:
                        self.assertEqual(os.readlink(f"/proc/{server.pid}/fd/{each}"), "/dev/null")

    @unittest.skipIf(SANITIZED, "sanitizers take signals that are fatal")
    def test_a_fatal_signal_ends_the_server_whoever_sends_it(self):
        for number in (signal.SIGABRT, signal.SIGSEGV):
            with LossdServer(BINARY, "--device=cpu") as server:
                server.signal(number)
                self.assertEqual(server.wait(), -number)

    @unittest.mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="")
    def test_a_gpu_that_is_not_there_is_an_error_that_says_so_and_auto_takes_the_cpu(self):
        result = run("--device=cuda:0", "--listen=127.0.0.1:0", "--metrics_listen=")
        self.assertEqual(result.returncode, 1)
        self.assertIn("cuda:0: ", result.stderr)
        with LossdServer(BINARY, "--device=auto") as server:
            self.assertIn("using the CPU", server.log())
            self.assertIn("device=\"CPU", server.log())

    @unittest.mock.patch.dict(os.environ)
    def test_the_server_leaves_the_processors_to_others_between_products(self):
        os.environ.pop("OMP_WAIT_POLICY", None)  # which the server would keep
        with LossdServer(BINARY) as server:
            with open(f"/proc/{server.pid}/environ", "rb") as file:
                self.assertIn(b"OMP_WAIT_POLICY=passive", file.read().split(b"\0"))

    @unittest.skipIf(SANITIZED, "ThreadSanitizer's build has one thread")
    def test_bound_threads_of_openmp_leave_the_server_its_processors(self):
        mine = os.sched_getaffinity(0)
        all_of_them = ",".join(map(str, sorted(mine)))
        for name, value in [("OMP_PROC_BIND", "true"), ("OMP_PROC_BIND", "close"), ("OMP_PLACES", "cores"),
                            ("GOMP_CPU_AFFINITY", all_of_them.replace(",", " "))]:
            for policy in ({}, {"OMP_WAIT_POLICY": "passive"}):
                with self.subTest(name, value=value, policy=policy), \
                        unittest.mock.patch.dict(os.environ, {name: value, **policy}), LossdServer(BINARY, "--device=cpu") as server:
                    self.assertEqual(os.sched_getaffinity(server.pid), mine)
                    self.assertIn(f"device=\"CPU, {len(mine)} thread", server.log())

    @unittest.skipIf(SANITIZED, "ThreadSanitizer's build has one thread")
    def test_few_or_many_threads_are_said_with_their_reason(self):
        many = 2 * os.cpu_count()
        fewer = "fewer threads than the machine has processors" if os.cpu_count() > 1 else ""
        for name, value, device, words in [("OMP_NUM_THREADS", 1, "CPU, 1 thread", fewer), ("OMP_THREAD_LIMIT", 1, "CPU, 1 thread", fewer),
                                           ("OMP_NUM_THREADS", many, f"CPU, {many} threads", "more threads than processors")]:
            with self.subTest(name, value=value), unittest.mock.patch.dict(os.environ, {name: str(value)}), \
                    LossdServer(BINARY, "--device=cpu") as server:
                self.assertIn(f"device=\"{device}\"", server.log())
                self.assertIn(words, server.log())

    @unittest.skipIf(SANITIZED, "sanitizers stand before the start of threads themselves")
    def test_threads_that_cannot_be_started_are_found_at_the_start(self):
        stack = {"OMP_NUM_THREADS": "2", "OMP_STACKSIZE": "100000000G"}  # more than an address space: EAGAIN
        with unittest.mock.patch.dict(os.environ, stack):
            result = run("--device=cpu", "--listen=127.0.0.1:0", "--metrics_listen=")
        self.assertEqual(result.returncode, 3, result.stderr)
        self.assertIn("no thread could be started", result.stderr)
        self.assertIn("ulimit -u", result.stderr)

    def test_a_port_that_is_taken_is_an_error_that_says_so(self):
        with LossdServer(BINARY) as server:
            for flag, others in (("--listen", ["--metrics_listen="]), ("--metrics_listen", ["--listen=127.0.0.1:0"]),
                                 ("--health_listen", ["--listen=127.0.0.1:0", "--metrics_listen="])):
                result = run(f"{flag}={server.target}", *others)
                self.assertEqual(result.returncode, 1)
                self.assertIn(f"{flag}: cannot listen on {server.target}: ", result.stderr)
                self.assertIn("perhaps another lossd runs there: stop it, or name another port", result.stderr)


class Configuration(unittest.TestCase):
    def start(self, config, *flags):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            with LossdServer(BINARY, f"--config={file.name}", *flags) as server:
                with grpc.insecure_channel(server.target) as channel:
                    heads = head_pb2_grpc.HeadServiceStub(channel).ListHeads(head_pb2.ListHeadsRequest()).heads
                    limits = open_session(channel, "a", "k").limits
                return heads, limits, server.log()

    def test_heads_and_flags_come_from_the_file_and_the_command_line_wins(self):
        config = {"max_chunk_bytes": 8192, "max_chunk_tokens": 77, "log_format": "json",
                  "heads": [{"name": "a", "vocab_size": 100, "hidden_size": 8},
                            {"name": "b", "vocab_size": 50, "hidden_size": 4, "weight_dtype": "float32"}]}
        heads, limits, log = self.start(config, "--max_chunk_bytes=16384")
        self.assertEqual([(h.config.name, h.config.vocab_size) for h in heads], [("a", 100), ("b", 50)])
        self.assertEqual(limits.max_chunk_bytes, 16384)
        self.assertEqual(limits.max_chunk_tokens, 77)
        events = [json.loads(line)["event"] for line in log.splitlines()]
        self.assertIn("serving", events)

    def test_a_head_from_the_file_has_the_loss_that_the_file_says(self):
        config = {"heads": [{"name": "a", "vocab_size": 100, "hidden_size": 8, "logit_scale": 0.5, "softcap": 30, "frozen": True},
                            {"name": "b", "vocab_size": 100, "hidden_size": 8, "frozen": False}]}
        heads, _, _ = self.start(config)
        self.assertEqual([(h.config.logit_scale, h.config.softcap, h.config.frozen) for h in heads],
                         [(0.5, 30, True), (1, 0, False)])

    @staticmethod
    def write_ones(path):
        header = json.dumps({"w": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header + np.ones(8, np.float32).tobytes())

    def test_a_head_that_was_restored_keeps_the_weights_it_had(self):
        with tempfile.TemporaryDirectory() as folder:
            self.write_ones(os.path.join(folder, "m"))
            config = {"heads": [{"name": "a", "vocab_size": 4, "hidden_size": 2, "weights": "m"}], "weights_dir": folder,
                      "checkpoint_dir": os.path.join(folder, "checkpoints")}
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                json.dump(config, file)
            logs = []
            for _ in range(2):
                with LossdServer(BINARY, f"--config={file.name}", "--restore") as server:
                    self.assertEqual(server.stop(), 0)
                    logs.append(server.log())
            self.assertIn("loaded weights", logs[0])
            self.assertNotIn("loaded weights", logs[1])

    def test_a_head_from_the_file_comes_up_loaded(self):
        with tempfile.TemporaryDirectory() as folder:
            self.write_ones(os.path.join(folder, "m"))
            head = {"name": "a", "vocab_size": 4, "hidden_size": 2, "weights": "m"}
            heads, _, log = self.start({"heads": [head], "weights_dir": folder})
            self.assertEqual([h.weight_version for h in heads], [1])
            self.assertIn("loaded weights", log)
            for wrong, words in [({"weights": "absent"}, ("head a", "absent")), ({"weights": "../m"}, ("relative",)),
                                 ({"weights_tensor": "v"}, ("no tensor 'v'",)), ({"hidden_size": 3}, ("[4, 3]",))]:
                with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                    json.dump({"heads": [head | wrong], "weights_dir": folder}, file)
                    file.flush()
                    result = run(f"--config={file.name}", "--listen=127.0.0.1:0", "--metrics_listen=")
                self.assertEqual(result.returncode, 1, wrong)
                for word in words:
                    self.assertIn(word, result.stderr)

    def test_while_heads_are_loaded_there_are_metrics_and_nothing_is_ready(self):
        rows, columns = 32768, 2048
        with tempfile.TemporaryDirectory() as folder:
            header = json.dumps({"w": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, 4 * rows * columns]}}).encode()
            with open(os.path.join(folder, "m"), "wb") as file:
                file.write(struct.pack("<Q", len(header)) + header)
                file.truncate(8 + len(header) + 4 * rows * columns)
            head = {"name": "a", "vocab_size": rows, "hidden_size": columns, "weights": "m"}
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                json.dump({"heads": [head], "weights_dir": folder}, file)
            metrics, probes = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
            server = LossdServer(BINARY, "--device=cpu", f"--config={file.name}", f"--metrics_listen={metrics}",
                                 f"--health_listen={probes}")
            self.addCleanup(server.close)
            server.begin()

            def loaded():
                return read_metrics(f"http://{metrics}/metrics").get('lossd_head_weight_version{head="a"}') == 1

            def scraped():
                with contextlib.suppress(urllib.error.URLError):
                    self.assertFalse(loaded())
                    return True

            def loaded_while_not_ready():
                status = health(probe)
                if loaded():
                    return True
                self.assertEqual(status, NOT_SERVING)

            server.wait_until(scraped, "metrics of a server that loads a head", every=0)
            with grpc.insecure_channel(probes) as probe:
                server.wait_until(loaded_while_not_ready, "a head that is loaded", every=0)
                server.wait_until(lambda: health(probe) == SERVING, "a server that is ready")

    def test_a_head_from_the_file_has_the_optimizer_that_the_file_says(self):
        config = {"heads": [{"name": "a", "vocab_size": 100, "hidden_size": 8, "bias": True, "master_weights": True,
                             "double_buffer": True, "fixed_segments": True,
                             "optimizer": {"kind": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}},
                            {"name": "b", "vocab_size": 100, "hidden_size": 8, "optimizer": {"kind": "adamw", "beta2": 0.95}}]}
        heads, _, _ = self.start(config)
        sgd, adamw = (head.config for head in heads)
        self.assertEqual((sgd.bias, sgd.master_weights, sgd.double_buffer, sgd.fixed_segments), (True, True, True, True))
        self.assertEqual((sgd.optimizer.kind, sgd.optimizer.momentum, sgd.optimizer.nesterov, sgd.optimizer.weight_decay),
                         (head_pb2.OPTIMIZER_KIND_SGD, 0.9, True, 0.1))
        self.assertEqual((adamw.optimizer.kind, adamw.optimizer.weight_decay, adamw.optimizer.beta1, adamw.optimizer.beta2,
                          adamw.optimizer.eps), (head_pb2.OPTIMIZER_KIND_ADAMW, 0.01, 0.9, 0.95, 1e-8))
        self.assertFalse(adamw.master_weights or adamw.double_buffer or adamw.bias or adamw.fixed_segments)

    def test_a_head_with_an_odd_value_or_a_misspelt_key_is_an_error(self):
        for head, words in [({"vocab_size": 2.5}, ("vocab_size", "2.5", "integer")),
                            ({"hidden_size": True}, ("hidden_size", "true", "integer")),
                            ({"softcap": "30"}, ("softcap", "30", "a number")),
                            ({"softcap": -1}, ("softcap", "-1", "above 0")),
                            ({"logit_scale": 0}, ("logit_scale", "is 0", "above 0")),
                            ({"frozen": 1}, ("frozen", "1", "true or false")),
                            ({"weights": 7}, ("weights", "7", "text")),
                            ({"weights_tensor": "x"}, ("weights_tensor", "'weights'")),
                            ({"weights": "x"}, ("'x'", "--weights_dir")),
                            ({"weight_dtype": "int8"}, ("weight_dtype", "int8", "bfloat16")),
                            ({"optimizer": "adamw"}, ("optimizer", '"adamw"', "an object with a kind")),
                            ({"optimizer": {"kind": "rmsprop"}}, ("kind", "rmsprop", "sgd, adam, adamw")),
                            ({"optimizer": {"kind": "sgd", "beta1": "x"}}, ("beta1", '"x"', "a number")),
                            ({"optimizer": {"kind": "sgd", "lr": 1}}, ("'lr'", "momentum")),
                            ({"optimizer": {"kind": "sgd", "nesterov": True}}, ("optimizer.nesterov",)),
                            ({"double_buffer": 1}, ("double_buffer", "true or false")),
                            ({"fixed_segments": 1}, ("fixed_segments", "true or false")),
                            ({"spare_bytes": "2G"}, ("no 'spare_bytes'", "it has name")),
                            ({"weight_type": "float32"}, ("'weight_type'", "weight_dtype"))]:
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                json.dump({"heads": [{"name": "a", "vocab_size": 4, "hidden_size": 4} | head]}, file)
                file.flush()
                result = run(f"--config={file.name}")
            self.assertEqual(result.returncode, 2, head)
            for word in words:
                self.assertIn(word, result.stderr)

    def test_sizes_have_units_in_flags_and_in_the_file(self):
        _, limits, _ = self.start({"max_chunk_bytes": "64k", "staging_bytes": "2GiB", "heads": [
            {"name": "a", "vocab_size": 100, "hidden_size": 8}]}, "--lane_credit_bytes=2M")
        self.assertEqual((limits.max_chunk_bytes, limits.byte_credit), (64 << 10, 2 << 20))

    def test_a_file_that_is_not_what_was_meant_is_an_error(self):
        head = '{"name": "a", "vocab_size": 4, "hidden_size": 4}'
        for text, words in [('{"no_such_flag": 1}', ("no_such_flag",)),
                            ('{"max_heads": 1, "max_heads": 2}', ("'max_heads'", "twice")),
                            ('{"heads": [%s], "heads": []}' % head, ("'heads'", "twice")),
                            ('{"heads": [{"name": "a", "vocab_size": 4, "hidden_size": 4, "frozen": true, "frozen": false}]}',
                             ("'frozen'", "twice")),
                            ('{"heads": [%s, %s]}' % (head, head), ("'a'", "twice")),
                            ('{"heads": {"a": %s}}' % head, ("heads", "an object", "a list")),
                            ('{"heads": 3}', ("heads is 3", "a list")), ('{"heads": null}', ("heads is null", "a list")),
                            ('{"heads": ["a"]}', ("a head needs name",)),
                            ('{"listen": ["127.0.0.1:0"]}', ("listen", '["127.0.0.1:0"]', "text")),
                            ('{"max_heads": {"a": 1}}', ("max_heads", '{"a":1}', "one value")),
                            ('{"checkpoint_dir": true}', ("checkpoint_dir", "true", "text")),
                            ('{"port_file": null}', ("port_file", "null", "text")), ('{"tokens": ""}', ("tokens", "name a file")),
                            ('{"staging_bytes": 2.5}', ("staging_bytes", "'2.5'")),
                            ('{"drain_timeout": "-1s"}', ("--drain_timeout", "-1s")),
                            ('[]', ("not a JSON object",)), ('{"max_heads": 1', ("not a JSON object",))]:
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                file.write(text)
                file.flush()
                result = run(f"--config={file.name}")
            self.assertEqual(result.returncode, 2, text)
            for word in words:
                self.assertIn(word, result.stderr)


class Drain(unittest.TestCase):
    def test_sigterm_finishes_and_answers_what_was_accepted_then_exits_with_0(self):
        vocab, hidden, tokens, chunks = 8192, 128, 256, 8
        rng = np.random.default_rng(3)
        with LossdServer(BINARY) as server, grpc.insecure_channel(server.target, options=OPTIONS) as channel:
            create_head(channel, "h", vocab, hidden)
            session = open_session(channel, "h", "drained")
            requests = queue.Queue()
            requests.put(start_request(session))
            stream = loss_pb2_grpc.LossServiceStub(channel).Compute(iter(requests.get, None))
            self.assertTrue(next(stream).HasField("ready"))
            for sequence in range(1, chunks + 1):
                requests.put(chunk_request(session, sequence, rng.integers(0, vocab, tokens),
                                           rng.standard_normal((tokens, hidden), dtype=np.float32)))
            first = next(stream)
            self.assertEqual(first.result.sequence, 1)
            server.signal(signal.SIGTERM)
            answered, applied = [1], 0
            with self.assertRaises(grpc.RpcError) as ended:
                for response in stream:
                    if response.HasField("result"):
                        answered.append(response.result.sequence)
                    if response.HasField("applied"):
                        applied = response.applied.applied
            requests.put(None)
            self.assertEqual(ended.exception.code(), grpc.StatusCode.UNAVAILABLE)
            self.assertEqual(answered, list(range(1, len(answered) + 1)), "answers are whole and in order")
            self.assertEqual(applied, answered[-1], "everything accepted was applied before the end")
            self.assertEqual(server.wait(), 0)
            self.assertIn("a gradient window was not flushed", server.log())

    def test_streams_that_idle_and_open_connections_do_not_hold_the_server_up(self):
        with LossdServer(BINARY) as server, grpc.insecure_channel(server.target) as channel:
            create_head(channel, "h", 64, 8)
            session = open_session(channel, "h", "idle")
            requests = queue.Queue()
            requests.put(start_request(session))
            stream = loss_pb2_grpc.LossServiceStub(channel).Compute(iter(requests.get, None))
            next(stream)
            self.assertEqual(server.stop(), 0)
            requests.put(None)

    def test_scrapes_go_on_beside_connections_that_say_nothing(self):
        def overtakes(server):
            port = int(server.metrics_url.split(":")[2].split("/")[0])
            idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
            for connection in idle:
                connection.sendall(b"GET /met")
            with urllib.request.urlopen(server.metrics_url) as response:
                self.assertEqual(response.status, 200)
            # If those that say nothing were not hung up on yet, the scrape did not wait for that.
            waiting = not select.select(idle, [], [], 0)[0]
            for connection in idle:
                connection.close()
            return waiting

        # Again, because on a machine that stalls they may be hung up on beside a scrape that did not wait.
        with LossdServer(BINARY) as server:
            self.assertTrue(any(overtakes(server) for _ in range(5)))

    def test_metrics_tell_what_was_done(self):
        with LossdServer(BINARY) as server, grpc.insecure_channel(server.target) as channel:
            create_head(channel, "h", 64, 8)
            session = open_session(channel, "h", "counted")
            good = chunk_request(session, 1, np.array([1, -100, 3]), np.ones((3, 8), np.float32))
            bad = chunk_request(session, 2, np.array([64]), np.ones((1, 8), np.float32))
            list(loss_pb2_grpc.LossServiceStub(channel).Compute(iter([start_request(session), good, bad])))
            create_head(channel, "s", 64, 8, optimizer=head_pb2.Optimizer(kind=head_pb2.OPTIMIZER_KIND_SGD))
            gradients = gradient_pb2_grpc.GradientServiceStub(channel)
            for generation in (1, 2, 2):  # the last is a repeat
                gradients.ApplyStep(gradient_pb2.ApplyStepRequest(head="s", generation=generation, learning_rate=1))
            with urllib.request.urlopen(server.metrics_url) as response:
                lines = response.read().decode().splitlines()
            for line in ('lossd_chunks_total{outcome="accumulated"} 1', 'lossd_chunks_total{outcome="rejected"} 1',
                         'lossd_rejected_total{reason="label"} 1', 'lossd_rejected_total{reason="gap"} 0',
                         'lossd_tokens_total{kind="valid"} 2', 'lossd_tokens_total{kind="ignored"} 1',
                         'lossd_memory_reserved_bytes{purpose="gradient",place="host"} 4096',
                         'lossd_steps_total{outcome="applied"} 0', 'lossd_steps_total{outcome="skipped"} 0',
                         'lossd_steps_total{outcome="empty"} 2',
                         'lossd_step_seconds_count 2', 'lossd_weight_versions_total 2',
                         'lossd_chunk_seconds_count{stage="forward"} 1', 'lossd_credit_bytes 0',
                         'lossd_staging_reserved_bytes 33554432', 'lossd_staging_limit_bytes '):
                self.assertTrue(any(found.startswith(line) for found in lines), line)
            cpu = next(float(found.split()[1]) for found in lines if found.startswith("process_cpu_seconds_total "))
            self.assertGreater(cpu, 0)


if __name__ == "__main__":
    unittest.main()
