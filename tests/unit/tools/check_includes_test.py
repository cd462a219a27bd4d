#!/usr/bin/python3
"""The include rules catch what they are there for, and let the rest through."""
import os
import sys
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
sys.path.insert(0, os.path.join(ROOT, "tools"))
import check_includes  # noqa: E402

PRESENT = {
    "kernels/data_type.h", "kernels/cpu/gemm.h", "server/engine/head/head.h", "server/engine/head/parts/window.h", "server/rpc/convert/convert.h",
    "server/telemetry/metrics.h", "server/startup/options.h", "client/src/connection/connection.h", "client/include/lossd/client.h",
    "server/engine/chunk/chunk.h", "server/engine/device/head_backend.h", "server/engine/device/cpu/cpu_backend.h", "server/engine/device/cuda/cuda_device.h",
    "server/engine/engine.h", "server/rpc/services/head_service.h", "client/src/session/session.h",
    "kernels/cuda/losses/smoothing.h", "kernels/cuda/memory/result.h", "kernels/collectives/communicator.h",
    "client/examples/train_lm/trunk.h", "tests/integration/server_fixture.h", "bench/kernels/measure.h",
}


def messages(path, *includes):
    lines = [f"#include {include}\n" for include in includes]
    return list(check_includes.violations_of(path, lines, PRESENT.__contains__))


class ForbiddenArrows(unittest.TestCase):
    CASES = [
        ("kernels/cpu/gemm.cc", "<grpcpp/grpcpp.h>"),
        ("kernels/cpu/gemm.cc", "<google/protobuf/message.h>"),
        ("kernels/cpu/gemm.cc", '"absl/status/status.h"'),
        ("kernels/cpu/gemm.cc", '"server/engine/head/head.h"'),
        ("kernels/cpu/gemm.cc", "<thread>"),
        ("kernels/cpu/gemm.cc", '"lossd/client.h"'),
        ("server/engine/head/head.cc", "<grpcpp/grpcpp.h>"),
        ("server/engine/head/head.cc", "<google/protobuf/message.h>"),
        ("server/engine/head/head.cc", '"lossd/v1/head.pb.h"'),
        ("server/engine/head/head.cc", '"server/rpc/convert/convert.h"'),
        ("server/engine/head/head.cc", '"server/telemetry/metrics.h"'),
        ("server/engine/head/head.cc", "<prometheus/counter.h>"),
        ("server/telemetry/metrics.cc", "<grpcpp/grpcpp.h>"),
        ("server/telemetry/metrics.cc", '"server/rpc/convert/convert.h"'),
        ("server/rpc/convert/convert.cc", '"kernels/cpu/gemm.h"'),
        ("server/rpc/convert/convert.cc", "<cuda_runtime.h>"),
        ("server/rpc/convert/convert.cc", '"lossd/client.h"'),
        ("server/main.cc", '"client/src/connection/connection.h"'),
        ("proto/safetensors/reader.cc", '"lossd/v1/head.pb.h"'),
        ("proto/safetensors/reader.cc", '"lossd/client.h"'),
        ("proto/wire/field_reader.cc", '"absl/status/status.h"'),
        ("client/src/session/session.cc", '"server/engine/head/head.h"'),
        ("client/src/session/session.cc", '"kernels/data_type.h"'),
        ("client/include/lossd/client.h", '"client/src/connection/connection.h"'),
        ("client/include/lossd/client.h", "<grpcpp/grpcpp.h>"),
        ("client/examples/train_lm/main.cc", '"client/src/connection/connection.h"'),
        ("client/examples/train_lm/main.cc", '"server/engine/head/head.h"'),
        ("tests/integration/package/outside/main.cc", '"client/src/connection/connection.h"'),
        ("tests/integration/a_test.cc", '"bench/kernels/measure.h"'),
        # Folders of one part: up, and to the side.
        ("server/engine/common/errors.cc", '"server/engine/chunk/chunk.h"'),
        ("server/engine/chunk/chunk.cc", '"server/engine/head/parts/window.h"'),
        ("server/engine/schedule/batch_queue.cc", '"server/engine/head/head.h"'),
        ("server/engine/head/head.cc", '"server/engine/engine.h"'),
        ("server/engine/head/parts/window.cc", '"server/engine/head/head.h"'),
        ("server/engine/device/device_factory.cc", '"server/engine/device/cpu/cpu_backend.h"'),
        ("server/engine/device/cpu/cpu_head.cc", '"server/engine/device/cuda/cuda_device.h"'),
        ("server/engine/device/staging.cc", '"server/engine/device/cpu/cpu_backend.h"'),
        ("server/rpc/convert/convert.cc", '"server/rpc/services/head_service.h"'),
        ("server/rpc/server.cc", '"server/startup/options.h"'),
        ("server/telemetry/common/logging.cc", '"server/telemetry/metrics.h"'),
        ("client/src/connection/tls.cc", '"client/src/session/session.h"'),
        ("client/src/c_api/json.cc", '"client/src/connection/connection.h"'),
        ("kernels/cuda/rows/bias.cu", '"kernels/cuda/losses/smoothing.h"'),
        ("kernels/data_type.cc", '"kernels/cpu/gemm.h"'),
        # What moves data between ranks.
        ("kernels/cpu/gemm.cc", "<gloo/context.h>"),
        ("kernels/cuda/rows/bias.cu", "<nccl.h>"),
        ("server/engine/head/head.cc", "<gloo/context.h>"),
        ("server/engine/head/head.cc", "<nccl.h>"),
        ("server/rpc/convert/convert.cc", "<nccl.h>"),
        ("tests/unit/collectives/ranks.cc", "<gloo/context.h>"),
        ("kernels/cpu/gemm.cc", '"kernels/collectives/gloo_communicator.h"'),
        ("kernels/collectives/gloo_communicator.cc", '"absl/status/status.h"'),
        ("kernels/collectives/gloo_communicator.cc", "<grpcpp/grpcpp.h>"),
        ("kernels/collectives/gloo_communicator.cc", "<thread>"),
        ("elsewhere/new.cc", "<vector>"),
    ]

    def test_each_is_reported_once_with_file_and_line(self):
        for path, include in self.CASES:
            with self.subTest(path=path, include=include):
                found = messages(path, include)
                self.assertEqual(len(found), 1, found)
                self.assertTrue(found[0].startswith(path), found)

    def test_spacing_does_not_hide_an_include(self):
        lines = ['  #  include   "server/engine/head/head.h"\n']
        self.assertEqual(len(list(check_includes.violations_of("kernels/a.cc", lines, PRESENT.__contains__))), 1)


class Spelling(unittest.TestCase):
    def test_own_headers_are_named_from_the_root(self):
        self.assertEqual(len(messages("server/engine/head/head.cc", '"head.h"')), 1)
        self.assertEqual(len(messages("server/engine/head/head.cc", '"server/engine/absent.h"')), 1)
        self.assertEqual(len(messages("server/engine/head/head.cc", "<server/engine/head/parts/window.h>")), 1)


class AllowedArrows(unittest.TestCase):
    CASES = [
        ("kernels/cpu/gemm.cc", '"kernels/cpu/gemm.h"', "<dnnl.hpp>", "<omp.h>"),
        ("server/engine/head/head.cc", '"kernels/data_type.h"', '"server/engine/head/parts/window.h"', '"absl/status/status.h"', "<thread>"),
        ("server/rpc/convert/convert.cc", '"server/engine/head/head.h"', '"lossd/v1/head.grpc.pb.h"', "<grpcpp/grpcpp.h>"),
        ("server/telemetry/metrics.cc", '"server/engine/head/parts/window.h"', "<prometheus/counter.h>"),
        ("server/main.cc", '"server/rpc/convert/convert.h"', '"server/telemetry/metrics.h"', '"server/startup/options.h"'),
        ("server/telemetry/metrics.cc", '"server/version.h"'),
        ("kernels/collectives/gloo_communicator.cc", '"kernels/collectives/communicator.h"', "<gloo/transport/context.h>", "<nccl.h>",
         "<cuda_runtime.h>", "<mutex>"),
        ("server/engine/head/head.cc", '"kernels/collectives/communicator.h"'),
        ("server/engine/engine.cc", '"server/engine/head/head.h"', '"server/engine/chunk/chunk.h"'),
        ("server/engine/device/cpu/cpu_backend.cc", '"server/engine/device/head_backend.h"'),
        ("kernels/cuda/rows/bias.cu", '"kernels/data_type.h"', '"kernels/cuda/memory/result.h"'),
        ("tests/integration/package/outside/main.cc", "<lossd/client.h>"),
        ("client/src/session/session.cc", '"lossd/client.h"', '"lossd/v1/loss.pb.h"', '"client/src/connection/connection.h"', "<grpcpp/grpcpp.h>"),
        ("client/examples/train_lm/main.cc", '"lossd/client.h"', '"client/examples/train_lm/trunk.h"', '"kernels/data_type.h"'),
        ("bench/transport/main.cc", '"bench/kernels/measure.h"', '"server/engine/head/head.h"', '"lossd/client.h"', '"tests/integration/server_fixture.h"'),
        ("tests/integration/a_test.cc", '"server/rpc/convert/convert.h"', '"lossd/client.h"', '"tests/integration/server_fixture.h"'),
    ]

    def test_none_is_reported(self):
        for path, *includes in self.CASES:
            with self.subTest(path=path):
                self.assertEqual(messages(path, *includes), [])


class PythonCircles(unittest.TestCase):
    def test_a_circle_is_reported_with_its_modules(self):
        for line in ("import p.a", "from p import a", "from p.a import name", "def f():\n    from p.a import name"):
            with self.subTest(line=line):
                found = check_includes.circles_of({"p": "", "p.a": "from p import b", "p.b": line})
                self.assertEqual(len(found), 1, found)
                self.assertRegex(found[0], r"p\.a imports p\.b|p\.b imports p\.a")

    def test_what_is_none_is_let_through(self):
        types_alone = "if TYPE_CHECKING:\n    from p.a import Name"
        sources = {"p": "from p.a import name", "p.a": "from p import b\nimport os", "p.b": types_alone}
        self.assertEqual(check_includes.circles_of(sources), [])


if __name__ == "__main__":
    unittest.main()
