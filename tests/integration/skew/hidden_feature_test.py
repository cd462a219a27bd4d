#!/usr/bin/python3
"""Today's client at a server that lacks a feature: a proxy in front of lossd takes the name out of what the server lists.
The Python package goes through the C library and the C++ one.

usage: hidden_feature_test.py LOSSD STUBS   with the package in PYTHONPATH and LOSSD_LIBRARY in the environment
"""
import concurrent.futures
import os
import sys
import unittest

import grpc
import lossd
import numpy as np
from lossd_server import LossdServer
from waiting import PATIENCE

BINARY, STUBS = sys.argv.pop(1), sys.argv.pop(1)
lossd.__path__.append(os.path.join(STUBS, "lossd"))  # the generated lossd.v1, beside the package of the same name
sys.path.append(STUBS)
from lossd.v1 import status_pb2  # noqa: E402
GET_STATUS = "/lossd.v1.StatusService/GetStatus"
VOCAB, HIDDEN, TOKENS = 32, 8, 60


class Proxy(grpc.GenericRpcHandler):
    """Hands every call on as bytes, and notes its path. `hide` changes the features of GetStatus."""

    def __init__(self, target, hide):
        self._channel = grpc.insecure_channel(target)
        self._hide = hide
        self.paths = []
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers((self,))
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, handler_call_details):
        path = handler_call_details.method
        self.paths.append(path)

        def forward(requests, context):
            call = self._channel.stream_stream(path)(requests)
            context.add_callback(call.cancel)
            try:
                for message in call:
                    yield self._changed(message) if path == GET_STATUS else message
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())

        return grpc.stream_stream_rpc_method_handler(forward)

    def _changed(self, message):
        status = status_pb2.GetStatusResponse.FromString(message)
        kept = self._hide(list(status.features))
        del status.features[:]
        status.features.extend(kept)
        return status.SerializeToString()

    def count(self, method):
        return sum(path.endswith("/" + method) for path in self.paths)

    def stop(self):
        self._server.stop(None).wait(PATIENCE)
        self._channel.close()


class HiddenFeature(unittest.TestCase):
    def setUp(self):
        server = LossdServer(BINARY, "--device=cpu")
        server.__enter__()
        self.addCleanup(server.__exit__)
        self.server = server
        rng = np.random.default_rng(9)
        self.weights = rng.normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32)
        self.hidden = rng.normal(0, 1, (TOKENS, HIDDEN)).astype(np.float32)
        self.labels = rng.integers(0, VOCAB, TOKENS)

    def connect(self, hide):
        proxy = Proxy(self.server.target, hide)
        self.addCleanup(proxy.stop)
        client = lossd.connect(proxy.target)
        self.addCleanup(client.close)
        return proxy, client

    def head(self, client, **config):
        head = client.create_head("h", VOCAB, HIDDEN, "float32", **config)
        head.write_weights(self.weights)
        return head

    def refused(self, feature):
        return self.assertRaisesRegex(lossd.UnimplementedError, f"does not have the feature '{feature}'")

    def test_what_the_server_lacks_is_not_sent_and_the_session_goes_on(self):
        proxy, client = self.connect(lambda names: [name for name in names if name != "token_returns"])
        self.assertNotIn("token_returns", client.status().features)
        head = self.head(client)
        with head.open_session() as session:
            with self.refused("token_returns") as caught:
                session.compute(self.hidden, self.labels, returns=("log_sum_exp",))
            self.assertIn("options.returns of lossd.v1.Chunk", str(caught.exception))
            self.assertIn(client.status().version, str(caught.exception))
            self.assertEqual(head.info().window_tokens, 0)
            session.compute(self.hidden, self.labels)
            head.discard()
        self.assertEqual(proxy.count("Compute"), 1)

    def test_calls_and_configurations_too(self):
        lacking = {"optimizer", "logits"}
        proxy, client = self.connect(lambda names: [name for name in names if name not in lacking])
        with self.refused("optimizer") as caught:
            self.head(client, optimizer=lossd.AdamW())
        self.assertIn("config.optimizer of lossd.v1.CreateHeadRequest", str(caught.exception))
        self.assertEqual(proxy.count("CreateHead"), 0)
        head = self.head(client)
        with self.refused("logits"):
            head.logits(self.hidden)
        self.assertEqual(proxy.count("Logits"), 0)

    def test_what_a_server_can_do_is_not_asked_again(self):
        proxy, client = self.connect(lambda names: names)
        asked = proxy.count("GetStatus")  # by connect()
        head = self.head(client)
        with head.open_session() as session:
            for _ in range(3):
                session.compute(self.hidden, self.labels)
            head.discard()
        self.assertEqual(proxy.count("GetStatus"), asked, proxy.paths)


if __name__ == "__main__":
    unittest.main()
