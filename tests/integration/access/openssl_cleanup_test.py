#!/usr/bin/python3
"""OpenSSL does not clean up when a program that uses gRPC ends: a thread of gRPC's that is still in it would read what is
gone, or leave behind what is never freed.

usage: openssl_cleanup_test.py WITNESS LOSSD LOSSCTL TEST_PROGRAM
"""
import os
import sys
import tempfile
import unittest
from unittest import mock

from lossd_server import LossdServer
from programs import run

from access_support import Certificates

WITNESS, LOSSD, LOSSCTL, TEST_PROGRAM = (sys.argv.pop(1) for _ in range(4))
CLEANED_UP = "OpenSSL has cleaned up"


@mock.patch.dict(os.environ, LD_PRELOAD=WITNESS)
class OpenSslCleanup(unittest.TestCase):
    def test_the_witness_speaks_in_a_program_that_leaves_openssl_alone(self):
        done = run(sys.executable, "-c", "import ssl", check=True)
        self.assertIn(CLEANED_UP, done.stderr)

    def test_server_and_tool(self):
        with tempfile.TemporaryDirectory() as folder:
            certificates = Certificates(folder)
            with LossdServer(LOSSD, "--device=cpu", f"--tls_certificate={certificates.certificate('server')}",
                             f"--tls_key={certificates.key('server')}") as server:
                status = run(LOSSCTL, "status", "--server", server.target, "--tls_ca", certificates.certificate("ca"))
                self.assertEqual(status.returncode, 0, status.stderr)
                self.assertNotIn(CLEANED_UP, status.stderr)
                self.assertEqual(server.stop(), 0)
                self.assertNotIn(CLEANED_UP, server.log())

    def test_test_programs(self):
        done = run(TEST_PROGRAM, "--test_file=tokens_test")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertNotIn(CLEANED_UP, done.stderr)


if __name__ == "__main__":
    unittest.main()
