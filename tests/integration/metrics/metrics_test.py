#!/usr/bin/python3
"""What a server says of itself in /metrics and on its status page, compared with docs/metrics.md and with what was done."""
import itertools
import json
import math
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

import grpc
import numpy as np
from lossd.v1 import (gradient_pb2, gradient_pb2_grpc, head_pb2, head_pb2_grpc, loss_pb2, loss_pb2_grpc, region_pb2,
                      status_pb2, status_pb2_grpc)
from lossd_server import LossdServer, ReplicaSet

from documented import documented_metrics
from scrape import Scrape
from streaming import F32, chunk_request, create_head, open_session, start_request

BINARY, DOCUMENT = sys.argv.pop(1), sys.argv.pop(1)
VOCAB, HIDDEN = 64, 8
SGD = {"optimizer": head_pb2.Optimizer(kind=head_pb2.OPTIMIZER_KIND_SGD)}


def methods():
    for file in (head_pb2, loss_pb2, gradient_pb2, region_pb2, status_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"{service.name}/{method.name}"


class WhatThereIs(unittest.TestCase):
    def test_the_document_says_what_a_server_exports(self):
        documented = documented_metrics(DOCUMENT)
        self.check(documented, lambda metric: not metric.of_groups and not metric.of_replicas)

    def test_the_document_says_what_a_group_exports(self):
        documented = documented_metrics(DOCUMENT)
        for metric in documented.values():
            if metric.of_ranks:
                metric.labels["rank"] = {"0", "1"}
        self.check(documented, lambda metric: not metric.of_replicas, "--devices=cpu,cpu")

    def test_the_document_says_what_replicas_export(self):
        documented = documented_metrics(DOCUMENT)
        with ReplicaSet(BINARY, 2) as servers:
            with grpc.insecure_channel(servers[0].target) as channel:
                create_head(channel, "a", VOCAB, HIDDEN)
            self.compare(documented, lambda metric: not metric.of_groups, Scrape(servers[0].metrics_url), replica={"0", "1"})
            for name in ("lossd_replica_late_seconds", "lossd_replica_unanswered_seconds", "lossd_replica_sessions_placed_total"):
                del documented[name]  # what the coordinator knows
            self.compare(documented, lambda metric: not metric.of_groups, Scrape(servers[1].metrics_url), replica={"1"})

    def check(self, documented, is_there, *flags):
        with LossdServer(BINARY, *flags) as server, grpc.insecure_channel(server.target) as channel:
            create_head(channel, "a", VOCAB, HIDDEN)
            self.compare(documented, is_there, Scrape(server.metrics_url))

    def compare(self, documented, is_there, scrape, replica=()):
        documented = {name: metric for name, metric in documented.items() if is_there(metric)}
        listed = {"method": set(methods()), "code": {code.name for code in grpc.StatusCode}, "head": {"a"}, "set": {"s"},
                  "replica": set(replica)}
        if "lossd_gpu_temperature_celsius" not in scrape.types:  # there is no GPU here
            documented = {name: metric for name, metric in documented.items() if not name.startswith("lossd_gpu_")}
        self.assertEqual({name: metric.type for name, metric in documented.items()}, scrape.types)
        for name, metric in documented.items():
            with self.subTest(name):
                found = scrape.labels[name]
                for labels in found:
                    self.assertEqual([label for label, _ in labels], list(metric.labels))
                values = {label: listed.get(label) or of_page for label, of_page in metric.labels.items()}
                if name == "lossd_head_memory_reserved_bytes":  # of these a head has what it has
                    for labels in found:
                        self.assertTrue(all(value in values[label] for label, value in labels), labels)
                elif name == "lossd_replica_set_whole":  # of which it is one
                    self.assertEqual(len(found), 1)
                elif name != "lossd_build_info":
                    every = {tuple(zip(values, choice)) for choice in itertools.product(*values.values())}
                    self.assertEqual(found, every)

    def test_everything_is_at_zero_before_anything_was_done(self):
        with LossdServer(BINARY, "--memory_limit_bytes=2147483648") as server:
            scrape = Scrape(server.metrics_url)
        self.assertEqual(scrape["lossd_memory_limit_bytes"], 2147483648)
        workspace = scrape['lossd_memory_reserved_bytes{purpose="workspace",place="host"}']
        self.assertEqual(scrape["lossd_memory_reserved_peak_bytes"], workspace)
        self.assertEqual(scrape["lossd_memory_free_bytes"], 2147483648 - workspace)
        at_once = {"lossd_memory_limit_bytes", "lossd_memory_free_bytes", "lossd_memory_reserved_peak_bytes",
                   "lossd_staging_limit_bytes", "lossd_build_info", "lossd_process_peak_memory_bytes",
                   "lossd_device_memory_bytes",
                   'lossd_memory_reserved_bytes{purpose="workspace",place="host"}'}
        not_zero = {series for series, value in scrape.values.items()
                    if value and not series.startswith("process_") and not {series, series.split("{")[0]} & at_once}
        self.assertEqual(not_zero, set())


class WhatIsDone(unittest.TestCase):
    FLAGS: tuple[str, ...] = ()

    def setUp(self):
        self.server = self.enterContext(LossdServer(BINARY, *self.FLAGS))
        channel = self.enterContext(grpc.insecure_channel(self.server.target))
        self.heads = head_pb2_grpc.HeadServiceStub(channel)
        self.losses = loss_pb2_grpc.LossServiceStub(channel)
        self.gradients = gradient_pb2_grpc.GradientServiceStub(channel)
        self.status = status_pb2_grpc.StatusServiceStub(channel)
        self.channel = channel

    def scrape(self):
        """Once streams and calls are over for the server, too. A page counts those that ended before it counts those under
        way: a call that ends in between is in neither, so the page to go by is the next one."""
        def quiet():
            under_way = {series: value for series, value in self.server.metrics().items()
                         if series == "lossd_live_streams" or series.startswith("lossd_rpcs_in_flight")}
            return not any(under_way.values())

        self.server.wait_until(quiet, "calls and streams are over")
        return Scrape(self.server.metrics_url)

    def compute(self, session, *chunks):
        answers = self.losses.Compute(iter([start_request(session), *chunks]))
        return [answer.result for answer in answers if answer.HasField("result")]

    def chunk(self, session, sequence, labels, scale=1.0):
        return chunk_request(session, sequence, np.array(labels), np.full((len(labels), HIDDEN), scale, np.float32))

    def flush(self, head, **arguments):
        return self.gradients.BeginFlush(
            gradient_pb2.BeginFlushRequest(**self.marks_and_generation(head), **arguments))

    def marks_and_generation(self, head):
        now = self.heads.GetHead(head_pb2.GetHeadRequest(name=head))
        return {"head": head, "generation": now.generation, "marks": now.sessions}


class Work(WhatIsDone):
    def test_a_chunk(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        before = self.scrape()
        result, = self.compute(session, self.chunk(session, 1, [1, -100, 3]))
        after = self.scrape()
        moved = after.since(before)
        self.assertAlmostEqual(moved.pop('lossd_head_loss_nats_total{head="h"}'), result.loss_sum, places=5)
        self.assertAlmostEqual(moved.pop('lossd_head_loss{head="h"}'), result.loss_sum / 2, places=5)
        stages = ("read", "queue", "forward", "weight_gradient", "answer")
        self.assertEqual(moved, {
            'lossd_chunks_total{outcome="accumulated"}': 1,
            'lossd_tokens_total{kind="valid"}': 2, 'lossd_tokens_total{kind="ignored"}': 1,
            'lossd_payload_bytes_total{direction="in"}': 3 * (8 + 4 * HIDDEN),
            'lossd_payload_bytes_total{direction="out"}': len(result.losses) + len(result.dx),
            "lossd_batch_chunks_count": 1, "lossd_batch_rows_count": 1,
            **{f'lossd_chunk_seconds_count{{stage="{stage}"}}': 1 for stage in stages},
            'lossd_head_tokens_total{head="h"}': 2, 'lossd_head_loss_tokens_total{head="h"}': 2,
            'lossd_head_window_tokens{head="h"}': 2})
        self.assertEqual(after["lossd_batch_rows_sum"] - before["lossd_batch_rows_sum"], 3)
        self.assertGreater(after['lossd_head_window_age_seconds{head="h"}'], 0)
        for stage in stages:
            taken = after[f'lossd_chunk_seconds_sum{{stage="{stage}"}}']
            self.assertGreater(taken, 0, stage)
            self.assertLess(taken, 600, stage)

    def test_rows_whose_factors_are_all_zero_are_skipped_and_counted(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        factors = np.array([0, 1, 0, 0, 0], np.float32)
        chunk = self.chunk(session, 1, [1, 2, -100, 4, 5])
        chunk.chunk.token_inputs.weights = factors.tobytes()
        chunk.chunk.token_inputs.lse_gradients = np.array([0, 0, 0, 3, 0], np.float32).tobytes()
        before = self.scrape()
        self.compute(session, chunk)
        self.compute(session, chunk)  # a repeat
        moved = self.scrape().since(before)
        self.assertEqual(moved['lossd_tokens_total{kind="valid"}'], 4)
        self.assertEqual(moved["lossd_rows_skipped_total"], 2)
        self.assertEqual(moved['lossd_head_rows_skipped_total{head="h"}'], 2)
        before = self.scrape()
        chunk.chunk.sequence = 2
        chunk.chunk.options.returns.log_sum_exp = True  # which has to be computed
        self.compute(session, chunk)
        chunk.chunk.sequence = 3
        chunk.chunk.options.returns.log_sum_exp = False
        chunk.chunk.mode = loss_pb2.COMPUTE_MODE_LOSS_ONLY  # where gradients mean nothing
        self.compute(session, chunk)
        self.assertEqual(self.scrape().since(before)["lossd_rows_skipped_total"], 3)

    def test_lists_are_counted_by_their_lengths(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        lists = [[1], [2, 5, 9], [7], list(range(40))]
        chunk = self.chunk(session, 1, [1, 2, -100, 3])
        kept = chunk.chunk.token_inputs.kept_tokens
        kept.offsets = np.cumsum([0] + [len(each) for each in lists]).astype(np.int64).tobytes()
        kept.ids = np.concatenate(lists).astype(np.int32).tobytes()
        before = self.scrape()
        self.compute(session, chunk)
        self.compute(session, chunk)  # a repeat
        after = self.scrape()
        self.assertEqual(after.since(before)["lossd_kept_tokens_count"], 3)
        self.assertEqual(after["lossd_kept_tokens_sum"], 1 + 3 + 40)
        up_to = [after[f'lossd_kept_tokens_bucket{{le="{bound}"}}'] for bound in (1, 2, 4, 32, 64)]
        self.assertEqual(up_to, [1, 1, 2, 2, 3])

    def test_lists_of_targets_are_counted_apart(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        chunk = self.chunk(session, 1, [1, -100])
        targets = chunk.chunk.token_inputs.target_lists
        targets.lists.offsets = np.array([0, 3, 3]).astype(np.int64).tobytes()
        targets.lists.ids = np.array([2, 5, 9]).astype(np.int32).tobytes()
        targets.probabilities = np.array([0.5, 0.25, 0.125]).astype(np.float32).tobytes()
        targets.weight = 1
        before = self.scrape()
        self.compute(session, chunk)
        after = self.scrape()
        self.assertEqual(after.since(before)["lossd_target_tokens_count"], 1)
        self.assertEqual(after["lossd_target_tokens_sum"], 3)
        self.assertNotIn("lossd_kept_tokens_count", after.since(before))

    def test_a_repeat_moves_no_loss(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        self.compute(session, self.chunk(session, 1, [1, 2]))
        before = self.scrape()
        self.compute(session, self.chunk(session, 1, [1, 2]))
        moved = self.scrape().since(before)
        self.assertEqual(moved['lossd_chunks_total{outcome="repeated"}'], 1)
        self.assertEqual([series for series in moved if "token" in series or "loss" in series.removeprefix("lossd")], [])

    def test_loss_only_chunks_are_not_in_the_window(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        before = self.scrape()
        chunk = self.chunk(session, 1, [1, 2])
        chunk.chunk.mode = loss_pb2.COMPUTE_MODE_LOSS_ONLY
        result, = self.compute(session, chunk)
        after = self.scrape()
        moved = after.since(before)
        self.assertEqual(moved['lossd_chunks_total{outcome="loss_only"}'], 1)
        self.assertAlmostEqual(moved['lossd_head_evaluation_loss_nats_total{head="h"}'], result.loss_sum, places=5)
        self.assertEqual(moved['lossd_head_evaluation_loss_tokens_total{head="h"}'], 2)
        for of_training in ("lossd_head_loss", "lossd_head_loss_nats_total", "lossd_head_loss_tokens_total"):
            self.assertNotIn(f'{of_training}{{head="h"}}', moved)
        self.assertEqual(moved['lossd_head_tokens_total{head="h"}'], 2)
        self.assertNotIn('lossd_head_window_tokens{head="h"}', moved)
        self.assertEqual(after['lossd_head_window_age_seconds{head="h"}'], 0)

    def test_content_that_is_rejected(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        before = self.scrape()
        self.compute(session, self.chunk(session, 1, [VOCAB]), self.chunk(session, 2, [1], math.nan))
        moved = self.scrape().since(before)
        self.assertEqual(moved, {
            'lossd_chunks_total{outcome="rejected"}': 2,
            'lossd_payload_bytes_total{direction="in"}': 2 * (8 + 4 * HIDDEN),
            'lossd_rejected_total{reason="label"}': 1, 'lossd_rejected_total{reason="non_finite"}': 1,
            'lossd_head_chunks_rejected_total{head="h"}': 2,
            'lossd_non_finite_total{kind="hidden_states"}': 1})

    def test_a_place_that_is_refused(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        before = self.scrape()
        with self.assertRaises(grpc.RpcError):
            self.compute(session, self.chunk(session, 5, [1]))
        after = self.scrape()
        moved = after.since(before)
        self.assertEqual(moved['lossd_chunks_total{outcome="refused"}'], 1)
        self.assertEqual(moved['lossd_rejected_total{reason="gap"}'], 1)
        code = 'lossd_rpcs_total{method="LossService/Compute",code="FAILED_PRECONDITION"}'
        self.assertEqual(after[code] - before[code], 1)

    def test_losses_and_gradients_that_are_not_finite(self):
        create_head(self.channel, "h", VOCAB, HIDDEN, **SGD)
        session = open_session(self.channel, "h", "c")
        result, = self.compute(session, self.chunk(session, 1, [1, 2], 1e38))
        self.assertFalse(math.isfinite(result.loss_sum))
        good, = self.compute(session, self.chunk(session, 2, [3] * 8))
        after = self.scrape()
        not_finite = int((~np.isfinite(np.frombuffer(result.losses, np.float32))).sum())
        self.assertEqual(after['lossd_non_finite_total{kind="loss"}'], not_finite)
        self.assertEqual(after['lossd_head_tokens_total{head="h"}'], 10)
        self.assertEqual(after['lossd_head_loss_tokens_total{head="h"}'], 10 - not_finite)
        self.assertAlmostEqual(after['lossd_head_loss_nats_total{head="h"}'], good.loss_sum, places=5)
        flush = self.flush("h", gradient_scale=3e38)  # dW times this overflows
        self.assertGreater(flush.non_finite, 0)
        self.assertEqual(self.scrape()['lossd_non_finite_total{kind="gradient"}'], flush.non_finite)
        self.gradients.AbortFlush(gradient_pb2.AbortFlushRequest(head="h", flush_id=flush.flush_id))
        step = self.gradients.ApplyStep(gradient_pb2.ApplyStepRequest(
            learning_rate=1, skip_non_finite=True, gradient_scale=3e38, **self.marks_and_generation("h")))
        self.assertTrue(step.skipped)
        after = self.scrape()
        self.assertEqual(after['lossd_steps_total{outcome="skipped"}'], 1)
        self.assertEqual(after['lossd_steps_total{outcome="applied"}'], 0)
        self.assertEqual(after['lossd_non_finite_total{kind="gradient"}'], 2 * flush.non_finite)
        self.assertFalse(math.isfinite(after['lossd_head_gradient_norm{head="h"}']))

    def test_logits(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        before = self.scrape()
        rows = np.ones((5, HIDDEN), np.float32).tobytes()
        self.losses.Logits(loss_pb2.LogitsRequest(head="h", rows=5, hidden_dtype=F32, hidden_states=rows))
        with self.assertRaises(grpc.RpcError):
            self.losses.Logits(loss_pb2.LogitsRequest(head="h", rows=4, hidden_dtype=F32, hidden_states=rows))
        self.assertEqual(self.scrape().since(before), {
            "lossd_logits_calls_total": 1, "lossd_logits_rows_total": 5, "lossd_logits_seconds_count": 1,
            'lossd_rejected_total{reason="length"}': 1})


def exposed(number: float) -> float:
    """With the digits that numbers have in what Prometheus reads."""
    return float(f"{number:.16g}")


class Windows(WhatIsDone):
    FLAGS = ("--parking_bytes=1M",)

    def test_a_flush(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        self.compute(session, self.chunk(session, 1, [1, 2]))
        before = self.scrape()
        flush = self.flush("h")
        frozen = self.scrape()
        self.assertEqual(frozen.since(before), {
            'lossd_flushes_total{phase="begun"}': 1, 'lossd_flush_seconds_count{phase="freeze"}': 1,
            'lossd_head_flush_phase{head="h",phase="open"}': -1, 'lossd_head_flush_phase{head="h",phase="frozen"}': 1,
            'lossd_head_gradient_norm{head="h"}': exposed(flush.norm)})
        self.assertGreater(frozen['lossd_head_flush_age_seconds{head="h"}'], 0)
        self.gradients.CommitFlush(gradient_pb2.CommitFlushRequest(head="h", flush_id=flush.flush_id))
        after = self.scrape()
        self.assertEqual(after.since(frozen), {
            'lossd_flushes_total{phase="committed"}': 1, 'lossd_flush_seconds_count{phase="read"}': 1,
            'lossd_flush_seconds_count{phase="commit"}': 1,
            'lossd_head_flush_phase{head="h",phase="open"}': 1, 'lossd_head_flush_phase{head="h",phase="frozen"}': -1,
            'lossd_head_generation{head="h"}': 1, 'lossd_head_window_tokens{head="h"}': -2})
        self.assertEqual(after['lossd_head_flush_age_seconds{head="h"}'], 0)
        self.assertEqual(after['lossd_head_window_age_seconds{head="h"}'], 0)

    def test_a_step_and_a_look_at_the_gradient(self):
        create_head(self.channel, "h", VOCAB, HIDDEN, **SGD)
        session = open_session(self.channel, "h", "c")
        self.compute(session, self.chunk(session, 1, [1, 2]))
        before = self.scrape()
        stats = self.gradients.GradientStats(
            gradient_pb2.GradientStatsRequest(**self.marks_and_generation("h")))
        looked = self.scrape()
        self.assertEqual(looked.since(before), {'lossd_head_gradient_norm{head="h"}': exposed(stats.norm)})
        step = self.gradients.ApplyStep(gradient_pb2.ApplyStepRequest(
            learning_rate=1, gradient_scale=2, **self.marks_and_generation("h")))
        moved = self.scrape().since(looked)
        self.assertAlmostEqual(moved.pop('lossd_head_gradient_norm{head="h"}'), step.norm - stats.norm, places=12)
        self.assertEqual(moved, {
            'lossd_steps_total{outcome="applied"}': 1, "lossd_step_seconds_count": 1, "lossd_weight_versions_total": 1,
            'lossd_head_weight_version{head="h"}': 1, 'lossd_head_generation{head="h"}': 1,
            'lossd_head_window_tokens{head="h"}': -2})

    def test_a_head_is_parked_and_comes_back(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        before = self.scrape()
        self.heads.ParkHead(head_pb2.ParkHeadRequest(name="h"))
        parked = self.scrape()
        moved = parked.since(before)
        self.assertEqual([moved[name] for name in (
            "lossd_heads", "lossd_parked_heads", "lossd_parked_bytes", 'lossd_head_parkings_total{direction="parked"}')],
            [-1, 1, 4 * VOCAB * HIDDEN, 1])
        self.assertEqual(moved["lossd_memory_free_bytes"], 3 * 4 * VOCAB * HIDDEN)
        config = head_pb2.HeadConfig(name="h", vocab_size=VOCAB, hidden_size=HIDDEN, weight_dtype=F32)
        self.heads.CreateHead(head_pb2.CreateHeadRequest(config=config))  # waits until it is back
        moved = self.scrape().since(parked)
        self.assertEqual([moved[name] for name in (
            "lossd_heads", "lossd_parked_heads", "lossd_parked_bytes", 'lossd_head_parkings_total{direction="back"}')],
            [1, -1, -4 * VOCAB * HIDDEN, 1])

    def test_sessions_and_heads_come_and_go(self):
        before = self.scrape()
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        moved = self.scrape().since(before)
        credit = moved["lossd_staging_reserved_bytes"]
        self.assertEqual((moved["lossd_heads"], moved["lossd_sessions"], moved['lossd_head_sessions{head="h"}']), (1, 1, 1))
        self.assertEqual(moved['lossd_head_staging_reserved_bytes{head="h"}'], credit)
        for purpose in ("weights", "weight_staging", "gradient"):
            place = f'purpose="{purpose}",place="host"}}'
            self.assertEqual(moved[f"lossd_memory_reserved_bytes{{{place}"], 4 * VOCAB * HIDDEN)
            self.assertEqual(moved[f'lossd_head_memory_reserved_bytes{{head="h",{place}'], 4 * VOCAB * HIDDEN)
        self.assertEqual(moved["lossd_memory_reserved_peak_bytes"], 3 * 4 * VOCAB * HIDDEN)
        self.losses.CloseSession(loss_pb2.CloseSessionRequest(session_id=session.session_id))
        self.heads.DeleteHead(head_pb2.DeleteHeadRequest(name="h"))
        after = self.scrape()
        self.assertEqual(after.since(before), {"lossd_memory_reserved_peak_bytes": 3 * 4 * VOCAB * HIDDEN,
                                               "lossd_weight_versions_total": 1})
        self.assertNotIn('head="h"', after.text)

    def test_calls(self):
        before = self.scrape()
        self.status.GetStatus(status_pb2.GetStatusRequest())
        with self.assertRaises(grpc.RpcError):
            self.heads.GetHead(head_pb2.GetHeadRequest(name="nothing"))
        after = self.scrape()
        moved = {series: value - before[series] for series, value in after.values.items()
                 if series.startswith(("lossd_rpcs_total", "lossd_rpc_seconds_count")) and value != before[series]}
        self.assertEqual(moved, {
            'lossd_rpcs_total{method="StatusService/GetStatus",code="OK"}': 1,
            'lossd_rpcs_total{method="HeadService/GetHead",code="NOT_FOUND"}': 1,
            'lossd_rpc_seconds_count{method="StatusService/GetStatus"}': 1,
            'lossd_rpc_seconds_count{method="HeadService/GetHead"}': 1})


class Checkpoints(WhatIsDone):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.FLAGS = (f"--checkpoint_dir={folder.name}/checkpoints",)
        super().setUp()

    def test_saves_and_restores(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        self.compute(session, self.chunk(session, 1, [1, 2]))
        before = self.scrape()
        begun = time.time()
        saved = self.heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="one"))
        after = self.scrape()
        self.assertEqual(after.since(before), {
            'lossd_checkpoints_total{operation="save",outcome="ok"}': 1,
            'lossd_checkpoint_seconds_count{operation="save"}': 1, "lossd_checkpoint_bytes_total": saved.bytes_written})
        at = after["lossd_checkpoint_last_success_timestamp_seconds"]
        self.assertLess(abs(at - begun), 600)
        disk = {kind: after[f'lossd_checkpoint_disk_bytes{{kind="{kind}"}}'] for kind in ("used", "free", "total")}
        self.assertGreaterEqual(disk["used"], saved.bytes_written)
        self.assertTrue(0 < disk["free"] <= disk["total"], disk)
        again = self.heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="two"))
        self.assertLess(again.bytes_written, saved.bytes_written)
        self.assertEqual(self.scrape()["lossd_checkpoint_bytes_total"], saved.bytes_written + again.bytes_written)
        self.heads.RestoreCheckpoint(head_pb2.RestoreCheckpointRequest(head="h", tag="one"))
        after = self.scrape()
        self.assertEqual(after['lossd_checkpoints_total{operation="restore",outcome="ok"}'], 1)
        two = after['lossd_checkpoint_disk_bytes{kind="used"}']
        self.assertGreater(two, disk["used"])
        freed = self.heads.DeleteCheckpoint(head_pb2.DeleteCheckpointRequest(head="h", tag="two")).bytes_freed
        self.assertGreater(freed, 0)
        self.assertEqual(self.scrape()['lossd_checkpoint_disk_bytes{kind="used"}'], two - freed)
        self.assertEqual(after['lossd_head_window_tokens{head="h"}'], 2)
        self.assertGreater(after['lossd_head_window_age_seconds{head="h"}'], 0)
        self.assertLess(after['lossd_head_window_age_seconds{head="h"}'], 600)

    def test_what_fails_is_told_from_what_was_never_there(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        self.compute(session, self.chunk(session, 1, [1]))
        before = self.scrape()
        for call in (lambda: self.heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="nobody", tag="one")),
                     lambda: self.heads.RestoreCheckpoint(head_pb2.RestoreCheckpointRequest(head="h", tag="none"))):
            with self.assertRaises(grpc.RpcError):
                call()
        self.assertEqual([series for series in self.scrape().since(before) if "checkpoint" in series.split("{")[0]], [])
        self.flush("h")
        with self.assertRaises(grpc.RpcError):
            self.heads.SaveCheckpoint(head_pb2.SaveCheckpointRequest(head="h", tag="one"))
        after = self.scrape()
        self.assertEqual(after['lossd_checkpoints_total{operation="save",outcome="failed"}'], 1)
        self.assertEqual(after["lossd_checkpoint_last_success_timestamp_seconds"], 0)


class StatusPage(WhatIsDone):
    def get(self, path):
        base = self.server.metrics_url.removesuffix("/metrics")
        with urllib.request.urlopen(base + path) as response:
            return response.headers, response.read().decode()

    def test_shows_what_was_done(self):
        create_head(self.channel, "english", VOCAB, HIDDEN)
        session = open_session(self.channel, "english", "a-client-key")
        result, = self.compute(session, self.chunk(session, 1, [1, 2]))
        with self.assertRaises(grpc.RpcError):
            self.heads.GetHead(head_pb2.GetHeadRequest(name="<script>alert(1)</script>"))
        scrape = self.scrape()
        headers, page = self.get("/")
        self.assertIn("default-src 'none'", headers["Content-Security-Policy"])
        for text in ("english", f"{VOCAB} × {HIDDEN}", session.incarnation[:6] + "…", "serving", "NOT_FOUND",
                     "&lt;script&gt;alert(1)"):
            self.assertIn(text, page)
        status = json.loads(self.get("/status.json")[1])
        head, = status["heads"]
        self.assertEqual((head["name"], head["window_tokens"], head["open_sessions"]), ("english", 2, 1))
        self.assertAlmostEqual(head["loss"], result.loss_sum / 2, places=5)
        idle = head["sessions"][0].pop("idle_seconds")
        self.assertTrue(0 <= idle < 3600, idle)
        self.assertEqual(head["sessions"][0], {
            "number": 1, "rank": 0, "lanes": 1, "streams": 0, "accepted": 1, "applied": 1})
        self.assertEqual(status["memory"]["reserved_bytes"],
                         scrape["lossd_memory_limit_bytes"] - scrape["lossd_memory_free_bytes"])
        self.assertEqual(status["recent_errors"][0]["code"], "NOT_FOUND")
        self.assertNotIn("<script>alert", page)
        for text in (page, json.dumps(status)):
            self.assertNotIn(session.session_id, text)
            self.assertNotIn(session.incarnation, text)
            self.assertNotIn("a-client-key", text, "who knows it can speak for the session")

    def test_shows_chunks_that_were_rejected_some_of_many(self):
        create_head(self.channel, "english", VOCAB, HIDDEN)
        session = open_session(self.channel, "english", "a-client-key")
        self.compute(session, *(self.chunk(session, sequence, [VOCAB]) for sequence in range(1, 101)))
        self.assertEqual(self.scrape()['lossd_head_chunks_rejected_total{head="english"}'], 100)
        status = json.loads(self.get("/status.json")[1])
        error = status["recent_errors"][-1]
        self.assertEqual((error["method"], error["code"]), ("LossService/Compute", "INVALID_ARGUMENT"))
        self.assertIn("a chunk of head english was rejected (session 1, lane 0): labels[0]", error["message"])
        self.assertNotIn(session.session_id, json.dumps(status))
        # A trainer that sends nothing else leaves room for others' errors.
        self.assertLess(len(status["recent_errors"]), 50)
        self.assertIn("a chunk of head english was rejected", self.get("/")[1])

    def test_throughput_is_seen(self):
        create_head(self.channel, "h", VOCAB, HIDDEN)
        session = open_session(self.channel, "h", "c")
        sequences = itertools.count(1)

        def rates_of_tokens():
            self.compute(session, self.chunk(session, next(sequences), [1, 2]))
            rates = json.loads(self.get("/status.json")[1])["per_second"]
            return rates["tokens"] and rates

        rates = self.server.wait_until(rates_of_tokens, "a rate of tokens", every=0)
        self.assertTrue(all(value > 0 for value in rates.values()), rates)

    def test_there_is_nothing_else(self):
        for path in ("/status", "/healthz", "/metrics/", "/favicon.ico"):
            with self.assertRaises(urllib.error.HTTPError) as refused, urllib.request.urlopen(
                    self.server.metrics_url.removesuffix("/metrics") + path):
                pass
            self.assertEqual(refused.exception.code, 404, path)


if __name__ == "__main__":
    unittest.main()
