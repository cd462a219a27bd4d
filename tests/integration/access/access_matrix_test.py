#!/usr/bin/python3
"""Who may call what: every method of every service, as every role, over every kind of connection."""
import os
import sys
import unittest

import grpc
from lossd_server import LossdServer

from access_support import (HEALTH, REFLECTION, REFUSALS, ROLES, TOKENS, SecuredTest, bearer, call, methods)

BINARY = sys.argv.pop(1)

# As docs/security.md says it; a method that is in none of them, or not there, fails the test.
LEAST = {
    "read-only": "StatusService: GetStatus GetMemory; HeadService: GetHead ListHeads ListCheckpoints",
    "trainer": "HeadService: CreateHead CopyHead BlendHead ParkHead BeginWrite WriteWeights CommitWrite "
               "ReadWeights SaveCheckpoint RestoreCheckpoint; "
               "LossService: OpenSession CloseSession Compute Logits; "
               "GradientService: BeginFlush ReadGradient CommitFlush AbortFlush GradientStats ApplyStep; "
               "RegionService: CreateRegion DeleteRegion",
    "admin": "HeadService: DeleteHead DeleteCheckpoint LoadWeights; StatusService: Drain",
}
DRAIN = "/lossd.v1.StatusService/Drain"


def least_roles():
    table = {}
    for role, text in LEAST.items():
        for part in text.split("; "):
            service, names = part.split(": ")
            for name in names.split():
                table[f"/lossd.v1.{service}/{name}"] = role
    return table


class Matrix(SecuredTest):
    def check(self, flags, connect):
        """`connect` gives a channel to a server that was started with `flags`."""
        table = least_roles()
        self.assertEqual(set(table), set(methods()), "the table of this test is that of the services")
        with LossdServer(BINARY, "--device=cpu", "--log_level=debug", f"--tokens={self.tokens}", *flags) as server:
            with connect(server) as channel:
                for path, least in {**table, REFLECTION: "read-only"}.items():
                    self.check_strangers(channel, path)
                    for role in ROLES:
                        if (path, role) != (DRAIN, "admin"):
                            self.check_role(channel, path, least, role)
                code, _ = call(channel, HEALTH)
                self.assertEqual(code, grpc.StatusCode.OK, "health is for everybody")
                code, _ = call(channel, "/lossd.v1.HeadService/NoSuchMethod", bearer(TOKENS["admin"]))
                self.assertEqual(code, grpc.StatusCode.UNIMPLEMENTED)
                code, _ = call(channel, "/lossd.v1.HeadService/NoSuchMethod")
                self.assertEqual(code, grpc.StatusCode.UNAUTHENTICATED)
                code, _ = call(channel, DRAIN, bearer(TOKENS["admin"]))
                self.assertEqual(code, grpc.StatusCode.OK)
            self.assertEqual(server.wait(), 0)
            for token in TOKENS.values():
                self.assertNotIn(token, server.log())

    def check_strangers(self, channel, path):
        for what, metadata in (("no token", None), ("an unknown token", bearer("x" * 32)), ("no scheme", bearer("")),
                               ("another scheme", [("authorization", "Basic " + TOKENS["admin"])]),
                               ("two tokens", bearer(TOKENS["admin"]) * 2),
                               ("a part of a token", bearer(TOKENS["admin"][:-1])),
                               ("more than a token", bearer(TOKENS["admin"] + "0"))):
            code, details = call(channel, path, metadata)
            self.assertEqual(code, grpc.StatusCode.UNAUTHENTICATED, f"{path} with {what}")
            self.assertTrue(details, path)
            self.assertNotIn(TOKENS["admin"][:-1], details)

    def check_role(self, channel, path, least, role):
        code, details = call(channel, path, bearer(TOKENS[role]))
        if ROLES.index(role) >= ROLES.index(least):
            self.assertNotIn(code, REFUSALS, f"{path} as {role}: {details}")
            return
        self.assertEqual(code, grpc.StatusCode.PERMISSION_DENIED, f"{path} as {role}")
        self.assertIn(f"needs a token of the role {least}", details)
        self.assertIn(role, details)

    def test_plain_text_on_loopback(self):
        self.check([], lambda server: grpc.insecure_channel(server.target))

    def test_a_socket_file(self):
        path = os.path.join(self.folder, "socket")
        self.check([f"--listen=unix:{path}"], lambda _: grpc.insecure_channel(f"unix:{path}"))

    def test_tls(self):
        self.check(self.certificates.server_flags(),
                   lambda server: grpc.secure_channel(server.target, self.certificates.client()))

    def test_tls_with_client_certificates(self):
        self.check([*self.certificates.server_flags(), f"--tls_client_ca={self.certificates.path('ca.pem')}"],
                   lambda server: grpc.secure_channel(server.target, self.certificates.client(with_certificate=True)))

    def test_without_a_file_of_tokens_everybody_may_do_everything(self):
        with LossdServer(BINARY, "--device=cpu") as server, grpc.insecure_channel(server.target) as channel:
            for path in (*methods(), REFLECTION):
                if path != DRAIN:
                    code, details = call(channel, path)
                    self.assertNotIn(code, REFUSALS, f"{path}: {details}")


if __name__ == "__main__":
    unittest.main()
