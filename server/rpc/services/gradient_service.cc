#include "server/rpc/services/gradient_service.h"

#include <array>
#include <memory>
#include <span>
#include <utility>

#include "proto/wire/row_wire.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/grpc_status.h"
#include "server/rpc/convert/wire.h"
#include "server/rpc/services/row_stream_reactor.h"

namespace lossd::rpc {
namespace {

// The head of a request that names marks, which are not too many.
template <typename Request>
absl::StatusOr<std::shared_ptr<engine::Head>> FindMarked(engine::Engine& engine, const Request& request) {
  absl::StatusOr<std::shared_ptr<engine::Head>> head = engine.FindHead(request.head());
  if (!head.ok()) return head;
  if (absl::Status marks = CheckMarks(request.marks()); !marks.ok()) return marks;
  return head;
}

}  // namespace

grpc::ServerUnaryReactor* GradientService::BeginFlush(grpc::CallbackServerContext* context,
                                                      const v1::BeginFlushRequest* request,
                                                      v1::BeginFlushResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::StatusOr<std::shared_ptr<engine::Head>> head = FindMarked(*engine_, *request);
  if (!head.ok()) {
    reactor->Finish(ToGrpc(head.status(), engine_->counters()));
    return reactor;
  }
  (*head)->BeginFlush(request->generation(), ToEngine(request->marks()),
                      request->has_gradient_scale() ? request->gradient_scale() : 1.0f,
                      [this, reactor, response](const absl::StatusOr<engine::FlushInfo>& flush) {
                        if (flush.ok()) {
                          response->set_flush_id(flush->flush_id);
                          response->set_rows(flush->rows);
                          response->set_columns(flush->columns);
                          response->set_norm(flush->stats.norm);
                          response->set_bias_norm(flush->stats.bias_norm);
                          response->set_window_tokens(flush->window_tokens);
                          response->set_non_finite(flush->stats.non_finite);
                        }
                        reactor->Finish(ToGrpc(flush.status(), engine_->counters()));
                      });
  return reactor;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* GradientService::ReadGradient(
    grpc::CallbackServerContext* /*context*/, const grpc::ByteBuffer* bytes) {
  const auto fail = [this](const absl::Status& status) {
    return new RowStreamReactor(ToGrpc(status, engine_->counters()));
  };
  v1::ReadGradientRequest request;
  grpc::ByteBuffer taken = *bytes;
  if (absl::Status status = Parse(&taken, &request); !status.ok()) return fail(status);
  absl::StatusOr<std::shared_ptr<engine::Head>> found = engine_->FindHead(request.head());
  if (!found.ok()) return fail(found.status());
  const std::shared_ptr<engine::Head> head = *std::move(found);
  if (absl::Status status = head->CheckFlush(request.flush_id()); !status.ok()) return fail(status);
  const absl::StatusOr<RowRange> range =
      ToRowRange(request.first_row(), request.rows(), head->config().vocab_size);
  if (!range.ok()) return fail(range.status());
  const absl::StatusOr<kernels::DataType> type =
      ToEngine(request.dtype(), "dtype", kernels::DataType::kFloat32);
  if (!type.ok()) return fail(type.status());

  RowStreamReactor::Source source;
  source.device = &engine_->device();
  source.range = *range;
  source.row_bytes = head->config().hidden_size * kernels::SizeOf(*type);
  source.bias_row_bytes = BiasRowBytes(head->config());
  source.message_bytes = row_message_bytes_;
  source.read = [head, flush_id = request.flush_id(), type = *type](int64_t first_row, int64_t rows,
                                                                    engine::RowsOut out,
                                                                    std::function<void(absl::Status)> done) {
    head->ReadGradient(flush_id, first_row, rows, type, out, std::move(done));
  };
  source.encode = [type = *type](int64_t first_row, int64_t rows, const grpc::Slice& data, std::string bias) {
    v1::ReadGradientResponse header;
    header.set_first_row(first_row);
    header.set_rows(rows);
    header.set_dtype(ToProto(type));
    const std::array gradient = {std::as_bytes(std::span(data.begin(), data.size()))};
    header.set_checksum(wire::ChecksumOf(bias, gradient));
    header.set_bias_gradient(std::move(bias));
    return wire::Encode(header, data);
  };
  source.translate = [this](const absl::Status& status) { return ToGrpc(status, engine_->counters()); };
  absl::StatusOr<std::shared_ptr<const void>> room =
      engine_->TakeRowStream(*head, RowStreamReactor::MostBytes(source));
  if (!room.ok()) return fail(room.status());
  source.room = *std::move(room);
  return new RowStreamReactor(std::move(source));  // deletes itself when gRPC is done with it
}

grpc::ServerUnaryReactor* GradientService::CommitFlush(grpc::CallbackServerContext* context,
                                                       const v1::CommitFlushRequest* request,
                                                       v1::CommitFlushResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto answer = [this, reactor, response](const absl::StatusOr<uint64_t>& generation) {
    if (generation.ok()) response->set_generation(*generation);
    reactor->Finish(ToGrpc(generation.status(), engine_->counters()));
  };
  const absl::StatusOr<std::shared_ptr<engine::Head>> head = engine_->FindHead(request->head());
  if (head.ok()) {
    (*head)->CommitFlush(request->flush_id(), answer);
  } else {
    answer(head.status());
  }
  return reactor;
}

grpc::ServerUnaryReactor* GradientService::AbortFlush(grpc::CallbackServerContext* context,
                                                      const v1::AbortFlushRequest* request,
                                                      v1::AbortFlushResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto answer = [this, reactor, response](const absl::StatusOr<uint64_t>& generation) {
    if (generation.ok()) response->set_generation(*generation);
    reactor->Finish(ToGrpc(generation.status(), engine_->counters()));
  };
  const absl::StatusOr<std::shared_ptr<engine::Head>> head = engine_->FindHead(request->head());
  if (head.ok()) {
    (*head)->AbortFlush(request->flush_id(), answer);
  } else {
    answer(head.status());
  }
  return reactor;
}

grpc::ServerUnaryReactor* GradientService::GradientStats(grpc::CallbackServerContext* context,
                                                         const v1::GradientStatsRequest* request,
                                                         v1::GradientStatsResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::StatusOr<std::shared_ptr<engine::Head>> head = FindMarked(*engine_, *request);
  if (!head.ok()) {
    reactor->Finish(ToGrpc(head.status(), engine_->counters()));
    return reactor;
  }
  (*head)->ReadStats(request->generation(), ToEngine(request->marks()),
                     request->has_gradient_scale() ? request->gradient_scale() : 1.0,
                     [this, reactor, response](const absl::StatusOr<engine::Head::WindowStats>& stats) {
                       if (stats.ok()) {
                         response->set_norm(stats->gradient.norm);
                         response->set_bias_norm(stats->gradient.bias_norm);
                         response->set_largest(stats->gradient.largest);
                         response->set_non_finite(stats->gradient.non_finite);
                         response->set_window_tokens(stats->window_tokens);
                       }
                       reactor->Finish(ToGrpc(stats.status(), engine_->counters()));
                     });
  return reactor;
}

grpc::ServerUnaryReactor* GradientService::ApplyStep(grpc::CallbackServerContext* context,
                                                     const v1::ApplyStepRequest* request,
                                                     v1::ApplyStepResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::StatusOr<std::shared_ptr<engine::Head>> head = FindMarked(*engine_, *request);
  if (!head.ok()) {
    reactor->Finish(ToGrpc(head.status(), engine_->counters()));
    return reactor;
  }
  (*head)->ApplyStep(request->generation(), ToEngine(request->marks()), ToEngine(*request),
                     [this, reactor, response](const absl::StatusOr<engine::StepResult>& step) {
                       if (step.ok()) ToProto(*step, response);
                       reactor->Finish(ToGrpc(step.status(), engine_->counters()));
                     });
  return reactor;
}

}  // namespace lossd::rpc
