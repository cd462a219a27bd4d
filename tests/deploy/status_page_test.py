#!/usr/bin/python3
"""The status page as a browser shows it: under its own policy it fetches itself again, and says when it cannot.

usage: status_page_test.py LOSSD
"""

from __future__ import annotations

import http.server
import sys
import threading
import unittest
import urllib.request

import browser
from lossd_server import LossdServer

BINARY = sys.argv.pop(1)


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


if __name__ == "__main__":
    unittest.main()
