"""What the tests of access share: certificates, files of tokens, and calls of any method by its path."""
import os
import tempfile
import unittest

import grpc
from certificates import Authority
from lossd.v1 import gradient_pb2, head_pb2, loss_pb2, region_pb2, status_pb2

ROLES = ("read-only", "trainer", "admin")
TOKENS = {role: f"{role}-token-0123456789abcdef" for role in ROLES}
REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
HEALTH = "/grpc.health.v1.Health/Check"


def methods():
    """Paths of every method of lossd.v1, from the descriptors."""
    for module in (gradient_pb2, head_pb2, loss_pb2, region_pb2, status_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}"


def bearer(token):
    return [("authorization", f"Bearer {token}")]


class _Bearer(grpc.UnaryUnaryClientInterceptor, grpc.StreamUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    def __init__(self, token):
        self._metadata = bearer(token)

    def intercept_unary_unary(self, continuation, client_call_details, request):
        return continuation(client_call_details._replace(metadata=self._metadata), request)

    intercept_stream_unary = intercept_stream_stream = intercept_unary_unary


def with_token(channel, token):
    """The channel, with the token on every call."""
    return grpc.intercept_channel(channel, _Bearer(token))


def call(channel, path, metadata=None, message=b""):
    """(code, details) of a call with one message, whatever kind of stream the method is."""
    stream = channel.stream_stream(path)(iter([message]), metadata=metadata, timeout=60)
    try:
        for _ in stream:
            pass
    except grpc.RpcError:
        pass
    return stream.code(), stream.details()


def write_tokens(path, tokens):
    """`tokens`: (role, token) pairs. The file is replaced in one step."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write("# role token\n" + "".join(f"{role} {token}\n" for role, token in tokens))
    os.chmod(path + ".new", 0o600)
    os.replace(path + ".new", path)


class Certificates(Authority):
    """ca.pem; server.pem and client.pem with their keys, signed by it, good for `days`."""

    def __init__(self, folder, days=30):
        super().__init__(folder, days)
        self.issue("server")
        self.issue("client", "DNS:client")

    def path(self, name):
        return self.folder / name

    def client(self, with_certificate=False):
        """Channel credentials."""
        own = (self.key("client").read_bytes(), self.certificate("client").read_bytes()) if with_certificate else ()
        return grpc.ssl_channel_credentials(self.certificate("ca").read_bytes(), *own)


class SecuredTest(unittest.TestCase):
    """Has a `folder`, with `certificates` and the file `tokens`, which has a token of each role."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = folder.name
        cls.certificates = Certificates(cls.folder)
        cls.tokens = os.path.join(cls.folder, "tokens")
        write_tokens(cls.tokens, TOKENS.items())
