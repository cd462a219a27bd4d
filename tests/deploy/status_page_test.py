#!/usr/bin/python3
"""The status page as a browser shows it: under its own policy it fetches itself again, and says when it cannot.

usage: status_page_test.py LOSSD [PICTURES]   PICTURES: a folder to keep the picture of a page under load in
"""

from __future__ import annotations

import http.server
import json
import re
import sys
import tempfile
import threading
import unittest
import urllib.request
from pathlib import Path

import browser
import grpc
from lossd.v1 import head_pb2, head_pb2_grpc
from lossd_server import LossdServer
from PIL import Image
from training import Training

BINARY = sys.argv[1]
PICTURES = Path(sys.argv[2]) if len(sys.argv) > 2 else None
del sys.argv[1:]
TRACE = "0af7651916cd43dd8448eb211c80319c"
# Small, so that the bars have something to show.
FLAGS = ("--workspace_bytes=1048576", "--memory_limit_bytes=3145728", "--staging_bytes=134217728")


class Replay:
    """Serves what a lossd once said of itself, headers and all; every answer but the first is changed by `later`, or is an
    error if that answers nothing."""

    def __init__(self, later):
        with LossdServer(BINARY) as server, urllib.request.urlopen(server.metrics_url.removesuffix("metrics")) as page:
            headers, body = page.headers, page.read().decode()
        self.asked = 0
        replay = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path != "/":
                    self.send_error(404)
                    return
                replay.asked += 1
                text = body if replay.asked == 1 else later(body)
                if not text:
                    self.send_error(503)
                    return
                content = text.encode()
                self.send_response(200)
                for name in ("Content-Type", "Content-Security-Policy"):
                    self.send_header(name, headers[name])
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def dom(self):
        try:
            return browser.dom(f"http://127.0.0.1:{self._server.server_port}/")
        finally:
            self._server.shutdown()
            self._server.server_close()


class StatusPage(unittest.TestCase):
    def test_fetches_itself_again(self):
        replay = Replay(lambda body: body.replace("There are none yet.", "There is news."))
        dom = replay.dom()
        self.assertGreater(replay.asked, 1)
        self.assertIn("There is news.", dom)
        self.assertNotIn("There are none yet.", dom)
        self.assertNotIn('class="lost"', dom)

    def test_says_when_the_server_does_not_answer_and_keeps_what_it_said(self):
        replay = Replay(lambda body: None)
        dom = replay.dom()
        self.assertGreater(replay.asked, 2, "it goes on trying")
        self.assertIn('class="lost"', dom)
        self.assertIn("There are none yet.", dom)

    def test_runs_nothing_that_was_put_into_it(self):
        evil = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
        dom = Replay(lambda body: body.replace("There are none yet.", evil)).dom()
        self.assertNotIn("<title>taken</title>", dom)
        self.assertIn("onerror", dom, "it was put there")

    def test_shows_live_figures_under_load(self):
        with tempfile.TemporaryDirectory() as folder, LossdServer(
            BINARY, *FLAGS, f"--checkpoint_dir={folder}/checkpoints"
        ) as server, grpc.insecure_channel(server.target) as channel, Training(channel) as training:
            base = server.metrics_url.removesuffix("metrics")
            try:
                request = head_pb2.GetHeadRequest(name="nobody")
                traced = (("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),)
                head_pb2_grpc.HeadServiceStub(channel).GetHead(request, metadata=traced)
            except grpc.RpcError as error:
                self.assertEqual(error.code(), grpc.StatusCode.NOT_FOUND)
            training.wait(rounds=4)  # a step, and a flush, have been

            def has_figures():
                with urllib.request.urlopen(base + "status.json") as answer:
                    status = json.load(answer)
                return status["per_second"]["tokens"] > 0 and all(head["loss"] for head in status["heads"])

            server.wait_until(has_figures, "a rate of tokens, and losses", every=0.1)
            pictures = PICTURES or Path(folder)
            pictures.mkdir(parents=True, exist_ok=True)
            file = pictures / "status-page.png"
            browser.picture(base, file, 1280, 1160)
            dom = browser.dom(base)
        for text in ("lm_head", "draft", "NOT_FOUND", TRACE, "LossService/Compute", "1 of 1"):
            self.assertIn(text, dom)
        tokens = re.search(r"Tokens per second</span><b>([\d.,]+)", dom)
        self.assertIsNotNone(tokens)
        self.assertGreater(float(tokens[1].replace(",", "")), 0)
        self.assertNotIn('class="lost"', dom)
        with Image.open(file) as picture:
            colors = picture.convert("RGB").getcolors(maxcolors=1 << 24)
        seen = {color for _, color in colors}
        # The bars' colours: weights and gradients.
        self.assertTrue({(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= seen, sorted(seen)[:20])


if __name__ == "__main__":
    unittest.main()
