// A LossService that computes nothing: it answers each chunk with as many bytes, by way of a buffer that
// stands for the device's.
#ifndef LOSSD_BENCH_TRANSPORT_TRANSPORT_SERVER_H_
#define LOSSD_BENCH_TRANSPORT_TRANSPORT_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>

#include "lossd/v1/loss.grpc.pb.h"

namespace lossd::transport {

// How messages are made and read: by the generated classes, or by proto/wire.
enum class Codec { kGenerated, kSlices };

// What is measured.
struct Settings {
  Codec codec = Codec::kSlices;
  int64_t frame_bytes = 0;         // 0: gRPC's default
  int64_t write_buffer_bytes = 0;  // 0: gRPC's default
  int64_t lookahead_bytes = 0;     // 0: gRPC's default
  bool bdp_probe = true;
};

class TransportService final
    : public v1::LossService::WithRawCallbackMethod_Compute<v1::LossService::Service> {
 public:
  explicit TransportService(Codec codec) : codec_(codec) {}
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Compute(
      grpc::CallbackServerContext* context) override;

 private:
  const Codec codec_;
};

// For the server's builder and for the client's channels alike.
template <typename SetInt>
void Apply(const Settings& settings, const SetInt& set) {
  if (settings.frame_bytes > 0) set(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, static_cast<int>(settings.frame_bytes));
  if (settings.write_buffer_bytes > 0) {
    set(GRPC_ARG_HTTP2_WRITE_BUFFER_SIZE, static_cast<int>(settings.write_buffer_bytes));
  }
  if (settings.lookahead_bytes > 0) {
    set(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, static_cast<int>(settings.lookahead_bytes));
  }
  set(GRPC_ARG_HTTP2_BDP_PROBE, settings.bdp_probe ? 1 : 0);
}

}  // namespace lossd::transport

#endif  // LOSSD_BENCH_TRANSPORT_TRANSPORT_SERVER_H_
