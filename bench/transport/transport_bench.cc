// Measures the transport alone: chunks to a server that only answers, over loopback, in two processes.
//
//   lossd-transport-bench --lanes=4 --codec=slices --malloc=raised --transport=tls
#include <grpcpp/grpcpp.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/transport/transport_server.h"
#include "client/src/batch/chunk_codec.h"
#include "client/src/connection/call_metadata.h"
#include "client/src/connection/grpc_compute_stream.h"
#include "client/src/connection/tls.h"
#include "server/engine/memory/process_memory.h"
#include "server/rpc/transport/tls.h"
#include "tests/integration/tls/certificates.h"

namespace lossd::transport {
namespace {

using Clock = std::chrono::steady_clock;
using internal::ComputeStream;

enum class Malloc { kDefault, kRaised };
enum class Transport { kTcp, kUds, kTls };

struct Options {
  Settings settings;
  Malloc malloc = Malloc::kRaised;
  Transport transport = Transport::kTcp;
  const testing::Certificates* certificates = nullptr;  // for TLS, and a folder for the socket
  int lanes = 1;
  int64_t chunk_bytes = int64_t{4} << 20;
  double seconds = 3;
  int window = 4;  // chunks of a lane under way
};

double CpuSeconds(const rusage& usage) {
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Serves until `stop` is closed at the other end; the port goes into `port`.
void Serve(const Options& options, int port_pipe, int stop) {
  TransportService service(options.settings.codec);
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(1 << 30);
  Apply(options.settings,
        [&builder](const char* name, int value) { builder.AddChannelArgument(name, value); });
  int port = 0;
  const testing::Certificates& files = *options.certificates;
  const rpc::TlsFiles tls{
      .certificate = files.Certificate("server"), .key = files.Key("server"), .client_ca = {}};
  builder.AddListeningPort(
      options.transport == Transport::kUds ? "unix:" + files.Path("socket") : "127.0.0.1:0",
      options.transport == Transport::kTls ? rpc::MakeServerCredentials(tls)
                                           : grpc::InsecureServerCredentials(),
      &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  char byte = 0;
  if (write(port_pipe, &port, sizeof(port)) == sizeof(port)) (void)!read(stop, &byte, 1);
  server->Shutdown(std::chrono::system_clock::now());
}

class LaneClient {
 public:
  LaneClient(const Options& options, int port)
      : options_(options),
        hidden_(static_cast<size_t>(options.chunk_bytes)),
        dx_(static_cast<size_t>(options.chunk_bytes)) {
    for (size_t i = 0; i < hidden_.size(); ++i) hidden_[i] = static_cast<std::byte>(i * 7 % 251);
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    Apply(options.settings, [&arguments](const char* name, int value) { arguments.SetInt(name, value); });
    const bool uds = options.transport == Transport::kUds;
    ClientOptions client;
    if (options.transport == Transport::kTls) {
      client.tls = TlsOptions{.ca_certificates = options.certificates->Certificate("ca")};
    }
    const std::string target =
        uds ? "unix:" + options.certificates->Path("socket") : "127.0.0.1:" + std::to_string(port);
    stream_ = std::make_unique<internal::GrpcComputeStream>(
        grpc::CreateCustomChannel(target, internal::MakeChannelCredentials(client).value(), arguments),
        internal::CallMetadata::Create(target, client).value(), nullptr);
  }
  ~LaneClient() { stream_.reset(); }  // before the memory that it may still read

  // Whether every answer held what was sent.
  bool Run(Clock::time_point end, std::atomic<int64_t>* chunks) {
    int under_way = 0;
    for (;;) {
      const bool more = Clock::now() < end;
      if (!more && under_way == 0) break;
      if (more && under_way < options_.window) {
        if (!stream_->Write(Encode())) return false;
        ++under_way;
        continue;
      }
      grpc::ByteBuffer message;
      if (stream_->Read(&message, std::nullopt) != ComputeStream::ReadResult::kMessage) return false;
      if (!Take(&message)) return false;
      --under_way;
      ++*chunks;
    }
    stream_->Close(std::chrono::milliseconds(2000));
    return dx_ == hidden_;
  }

 private:
  grpc::ByteBuffer Encode() const {
    v1::Chunk header;
    header.set_sequence(1);
    if (options_.settings.codec == Codec::kSlices) {
      const std::array parts = {std::span<const std::byte>(hidden_)};
      return internal::EncodeChunk(header, {}, parts, lent_);
    }
    // As the client did before: one copy into the message.
    const grpc::Slice copy(hidden_.data(), hidden_.size());
    return wire::Encode(header, {}, copy);
  }
  bool Take(grpc::ByteBuffer* message) {
    const auto response = internal::DecodedResponse::Decode(message);
    if (!response.ok() || response->dx_bytes() != options_.chunk_bytes) return false;
    const std::array parts = {std::span<std::byte>(dx_)};
    response->CopyDx(parts);
    return true;
  }

  const Options& options_;
  std::vector<std::byte> hidden_;
  std::vector<std::byte> dx_;
  internal::LentMemory lent_;
  std::unique_ptr<ComputeStream> stream_;
};

int Measure(const Options& options, int port, pid_t server, int stop) {
  std::vector<std::unique_ptr<LaneClient>> lanes;
  for (int i = 0; i < options.lanes; ++i) lanes.push_back(std::make_unique<LaneClient>(options, port));
  std::atomic<int64_t> chunks = 0;
  std::atomic<bool> right = true;
  const Clock::time_point begin = Clock::now();
  const auto end =
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.seconds));
  std::vector<std::thread> threads;
  for (const auto& lane : lanes) {
    threads.emplace_back([&right, &chunks, end, client = lane.get()] {
      if (!client->Run(end, &chunks)) right = false;
    });
  }
  for (std::thread& thread : threads) thread.join();
  const double wall = std::chrono::duration<double>(Clock::now() - begin).count();
  lanes.clear();
  close(stop);
  rusage theirs{};
  int status = 0;
  wait4(server, &status, 0, &theirs);
  rusage ours{};
  getrusage(RUSAGE_SELF, &ours);
  if (!right || status != 0) {
    std::fprintf(stderr, "the answers are not what was sent\n");
    return 1;
  }
  const double gigabytes = static_cast<double>(chunks * options.chunk_bytes) / 1e9;
  constexpr std::array kNames = {"tcp", "uds", "tls"};
  std::printf(
      "%s, lanes %d, chunk %ld KiB: %.2f GB/s each way, CPU s per GB each way: client %.2f, server %.2f\n",
      kNames[static_cast<size_t>(options.transport)], options.lanes,
      static_cast<long>(options.chunk_bytes >> 10), gigabytes / wall, CpuSeconds(ours) / gigabytes,
      CpuSeconds(theirs) / gigabytes);
  return 0;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app{"Throughput of chunks over loopback, without computing"};
  int64_t chunk_kib = 4096;
  int64_t frame_kib = 0;
  int64_t write_buffer_kib = 0;
  int64_t lookahead_kib = 0;
  const std::map<std::string, Codec> codecs = {{"generated", Codec::kGenerated}, {"slices", Codec::kSlices}};
  const std::map<std::string, Malloc> mallocs = {{"default", Malloc::kDefault}, {"raised", Malloc::kRaised}};
  const std::map<std::string, Transport> transports = {
      {"tcp", Transport::kTcp}, {"uds", Transport::kUds}, {"tls", Transport::kTls}};
  app.add_option("--transport", options.transport, "loopback, a socket file, or loopback with TLS")
      ->transform(CLI::CheckedTransformer(transports));
  app.add_option("--lanes", options.lanes, "connections");
  app.add_option("--chunk_kib", chunk_kib, "payload of a chunk, each way");
  app.add_option("--window", options.window, "chunks of a lane under way");
  app.add_option("--seconds", options.seconds);
  app.add_option("--codec", options.settings.codec)->transform(CLI::CheckedTransformer(codecs));
  app.add_option("--malloc", options.malloc)->transform(CLI::CheckedTransformer(mallocs));
  app.add_option("--frame_kib", frame_kib, "largest HTTP/2 frame; 0: gRPC's default");
  app.add_option("--write_buffer_kib", write_buffer_kib, "HTTP/2 write buffer; 0: gRPC's default");
  app.add_option("--lookahead_kib", lookahead_kib, "HTTP/2 window of a stream; 0: gRPC's default");
  app.add_option("--bdp_probe", options.settings.bdp_probe);
  CLI11_PARSE(app, argc, argv);
  options.chunk_bytes = chunk_kib << 10;
  options.settings.frame_bytes = frame_kib << 10;
  options.settings.write_buffer_bytes = write_buffer_kib << 10;
  options.settings.lookahead_bytes = lookahead_kib << 10;
  if (options.malloc == Malloc::kRaised) engine::RaiseMallocThresholds();

  const testing::Certificates certificates;
  options.certificates = &certificates;
  if (options.transport == Transport::kTls) {
    certificates.MakeAuthority("ca");
    certificates.Make("server", "ca", "IP:127.0.0.1");
  }
  int port_pipe[2];
  int stop_pipe[2];
  if (pipe(port_pipe) != 0 || pipe(stop_pipe) != 0) return 1;
  const pid_t server = fork();  // before gRPC has threads
  if (server == 0) {
    close(stop_pipe[1]);
    Serve(options, port_pipe[1], stop_pipe[0]);
    _exit(0);  // the folder is the parent's to remove
  }
  int port = 0;
  if (server < 0 || read(port_pipe[0], &port, sizeof(port)) != sizeof(port)) return 1;
  return Measure(options, port, server, stop_pipe[1]);
}

}  // namespace
}  // namespace lossd::transport

int main(int argc, char** argv) { return lossd::transport::Main(argc, argv); }
