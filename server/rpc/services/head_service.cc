#include "server/rpc/services/head_service.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/wire/row_wire.h"
#include "server/engine/common/errors.h"
#include "server/engine/common/random_id.h"
#include "server/engine/parked_head.h"
#include "server/rpc/convert/convert.h"
#include "server/rpc/convert/grpc_status.h"
#include "server/rpc/convert/wire.h"
#include "server/rpc/services/row_stream_reactor.h"

namespace lossd::rpc {
namespace {

constexpr size_t kMaxWriteKey = 256;
// From the first replica's next window to the last one's.
constexpr absl::Duration kLongestEndOfWindow = absl::Seconds(1);

// Takes row ranges until the client is done, then answers with their count.
class WriteWeightsReactor final : public grpc::ServerReadReactor<grpc::ByteBuffer> {
 public:
  WriteWeightsReactor(engine::Engine* engine, grpc::ByteBuffer* response)
      : engine_(engine), response_(response) {
    StartRead(&bytes_);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      v1::WriteWeightsResponse response;
      response.set_rows_received(rows_);
      *response_ = Serialize(response);
      Finish(grpc::Status::OK);
      return;
    }
    const absl::Status status = Write();
    if (!status.ok()) {
      Finish(ToGrpc(status, engine_->counters()));
      return;
    }
    rows_ += request_.rows();
    StartRead(&bytes_);
  }

  void OnDone() override { delete this; }

 private:
  absl::Status Write() {
    if (absl::Status status = Parse(&bytes_, &request_); !status.ok()) return status;
    // Looked up each time: a write that was replaced must not be written to any more.
    const absl::StatusOr<std::shared_ptr<engine::Head>> head = engine_->FindHead(request_.head());
    if (!head.ok()) return head.status();
    const absl::StatusOr<std::shared_ptr<engine::StagedWrite>> write =
        (*head)->FindWrite(request_.write_id());
    if (!write.ok()) return write.status();
    const absl::StatusOr<kernels::DataType> type = ToEngine(request_.dtype(), "dtype");
    if (!type.ok()) return type.status();
    return (*write)->Write(request_.first_row(), request_.rows(), *type, request_.weights(), request_.bias());
  }

  engine::Engine* const engine_;
  grpc::ByteBuffer* const response_;
  grpc::ByteBuffer bytes_;
  v1::WriteWeightsRequest request_;
  int64_t rows_ = 0;
};

// Hears of a client that no longer waits.
class LoadWeightsReactor final : public grpc::ServerUnaryReactor {
 public:
  void OnCancel() override { cancelled_ = true; }
  void OnDone() override { delete this; }  // NOLINT(cppcoreguidelines-owning-memory): gRPC is done with it
  bool cancelled() const { return cancelled_; }

 private:
  std::atomic<bool> cancelled_ = false;
};

}  // namespace

HeadService::HeadService(engine::Engine* engine, std::string weights_dir, int64_t row_message_bytes)
    : engine_(engine), loader_(engine, std::move(weights_dir)), row_message_bytes_(row_message_bytes) {
  // ListHeads, GetHead and ListCheckpoints only ask what there is.
  TakeKnownRequestsOnly(&engine->counters(), &HeadService::CreateHead, &HeadService::DeleteHead,
                        &HeadService::BeginWrite, &HeadService::CommitWrite, &HeadService::LoadWeights,
                        &HeadService::SaveCheckpoint, &HeadService::RestoreCheckpoint,
                        &HeadService::DeleteCheckpoint, &HeadService::CopyHead, &HeadService::BlendHead,
                        &HeadService::ParkHead);
}

grpc::ServerUnaryReactor* HeadService::CreateHead(grpc::CallbackServerContext* context,
                                                  const v1::CreateHeadRequest* request, v1::Head* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  memory_.Run([this, reactor, request, response] {
    const absl::StatusOr<engine::HeadConfig> config = ToEngine(*request);
    absl::Status status = config.status();
    if (status.ok()) {
      const absl::StatusOr<std::shared_ptr<engine::Head>> head = engine_->CreateHead(*config);
      status = head.status();
      if (status.ok()) status = Describe(**head, response);
    }
    reactor->Finish(ToGrpc(status, engine_->counters()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* HeadService::DeleteHead(grpc::CallbackServerContext* context,
                                                  const v1::DeleteHeadRequest* request,
                                                  v1::DeleteHeadResponse* /*response*/) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto discard = request->discard_gradient() ? engine::Engine::DiscardGradient::kYes
                                                   : engine::Engine::DiscardGradient::kNo;
  // It waits for the disk.
  const absl::Status begun = disk_.TryRun([this, reactor, name = request->name(), discard] {
    const absl::Status status =
        engine_->DeleteHead(name, discard, [reactor] { reactor->Finish(grpc::Status::OK); });
    if (!status.ok()) reactor->Finish(ToGrpc(status, engine_->counters()));
  });
  if (!begun.ok()) reactor->Finish(ToGrpc(begun, engine_->counters()));
  return reactor;
}

grpc::ServerUnaryReactor* HeadService::ListHeads(grpc::CallbackServerContext* context,
                                                 const v1::ListHeadsRequest* /*request*/,
                                                 v1::ListHeadsResponse* response) {
  return Asked(context, [this, response] {
    const engine::Engine::HeadList heads = engine_->AllHeads();
    for (const std::shared_ptr<engine::Head>& head : heads.here) {
      v1::Head* const described = response->add_heads();
      const absl::Status all = Describe(*head, described);
      // Whoever looks what there is sees it also while a replica is lost.
      if (!all.ok()) ToProto(head->Info(), described);
    }
    for (const auto& [name, parked] : heads.parked) {
      ToProto(parked->Info(engine_->options().chunk_limits), response->add_heads());
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* HeadService::GetHead(grpc::CallbackServerContext* context,
                                               const v1::GetHeadRequest* request, v1::Head* response) {
  return Asked(context, [this, request, response] {
    // Who only looks does not bring it back.
    if (const auto parked = engine_->FindParked(request->name()); parked.has_value()) {
      ToProto(*parked, response);
      return absl::OkStatus();
    }
    const absl::StatusOr<std::shared_ptr<engine::Head>> head = engine_->FindHead(request->name());
    return head.ok() ? Describe(**head, response) : head.status();
  });
}

grpc::ServerUnaryReactor* HeadService::Asked(grpc::CallbackServerContext* context,
                                             std::function<absl::Status()> work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  auto run = [this, reactor, work = std::move(work)] {
    reactor->Finish(ToGrpc(work(), engine_->counters()));
  };
  if (placer_ == nullptr) {
    run();
  } else if (const absl::Status taken = asking_.TryRun(std::move(run)); !taken.ok()) {
    reactor->Finish(ToGrpc(taken, engine_->counters()));
  }
  return reactor;
}

absl::Status HeadService::Describe(const engine::Head& head, v1::Head* response) const {
  const absl::Time end = absl::Now() + kLongestEndOfWindow;
  for (;;) {
    response->Clear();
    ToProto(head.Info(), response);
    if (placer_ == nullptr) return absl::OkStatus();
    absl::Status all = placer_->AddOthers(response);
    if (!absl::IsAborted(all)) return all;
    if (absl::Now() > end) return absl::UnavailableError(all.message());
    absl::SleepFor(absl::Milliseconds(1));
  }
}

absl::Status HeadService::CheckKey(absl::string_view field, const std::string& key) {
  if (!key.empty() && key.size() <= kMaxWriteKey) return absl::OkStatus();
  return engine::Invalid(
      engine::RejectReason::kOption, field,
      absl::StrCat(field, " has ", key.size(), " bytes; it must have 1 to ", kMaxWriteKey));
}

grpc::ServerUnaryReactor* HeadService::BeginWrite(grpc::CallbackServerContext* context,
                                                  const v1::BeginWriteRequest* request,
                                                  v1::BeginWriteResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  absl::Status status = CheckKey("write_key", request->write_key());
  if (status.ok()) {
    const absl::StatusOr<std::shared_ptr<engine::Head>> head = engine_->FindHead(request->head());
    status = head.status();
    if (status.ok()) {
      const auto replace = request->replace() ? engine::Head::Replace::kYes : engine::Head::Replace::kNo;
      const absl::StatusOr<std::string> id =
          (*head)->BeginWrite(request->write_key(), replace, engine::RandomId());
      status = id.status();
      if (status.ok()) response->set_write_id(*id);
    }
  }
  reactor->Finish(ToGrpc(status, engine_->counters()));
  return reactor;
}

grpc::ServerReadReactor<grpc::ByteBuffer>* HeadService::WriteWeights(grpc::CallbackServerContext* /*context*/,
                                                                     grpc::ByteBuffer* response) {
  return new WriteWeightsReactor(engine_, response);  // deletes itself when gRPC is done with it
}

grpc::ServerUnaryReactor* HeadService::CommitWrite(grpc::CallbackServerContext* context,
                                                   const v1::CommitWriteRequest* request,
                                                   v1::CommitWriteResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::StatusOr<std::shared_ptr<engine::Head>> head = engine_->FindHead(request->head());
  if (!head.ok()) {
    reactor->Finish(ToGrpc(head.status(), engine_->counters()));
    return reactor;
  }
  (*head)->CommitWrite(request->write_id(),
                       [this, reactor, response](const absl::StatusOr<uint64_t>& version) {
                         if (version.ok()) response->set_weight_version(*version);
                         reactor->Finish(ToGrpc(version.status(), engine_->counters()));
                       });
  return reactor;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* HeadService::ReadWeights(grpc::CallbackServerContext* /*context*/,
                                                                     const grpc::ByteBuffer* bytes) {
  const auto fail = [this](const absl::Status& status) {
    return new RowStreamReactor(ToGrpc(status, engine_->counters()));
  };
  v1::ReadWeightsRequest request;
  grpc::ByteBuffer taken = *bytes;
  if (absl::Status status = Parse(&taken, &request); !status.ok()) return fail(status);
  absl::StatusOr<std::shared_ptr<engine::Head>> found = engine_->FindHead(request.head());
  if (!found.ok()) return fail(found.status());
  const std::shared_ptr<engine::Head> head = *std::move(found);
  const engine::HeadConfig& config = head->config();
  const absl::StatusOr<RowRange> range = ToRowRange(request.first_row(), request.rows(), config.vocab_size);
  if (!range.ok()) return fail(range.status());
  const absl::StatusOr<kernels::DataType> type = ToEngine(request.dtype(), "dtype", config.weight_type);
  if (!type.ok()) return fail(type.status());

  RowStreamReactor::Source source;
  source.device = &engine_->device();
  source.range = *range;
  source.row_bytes = config.hidden_size * kernels::SizeOf(*type);
  source.bias_row_bytes = BiasRowBytes(config);
  source.message_bytes = row_message_bytes_;
  const auto version = std::make_shared<uint64_t>(0);  // of the first piece; the others must be of the same
  source.read = [head, type = *type, version, demanded = request.weight_version()](
                    int64_t first_row, int64_t rows, engine::RowsOut out,
                    std::function<void(absl::Status)> done) {
    head->ReadWeights(
        first_row, rows, type, out,
        [version, demanded, done = std::move(done)](const absl::StatusOr<uint64_t>& read) {
          if (!read.ok()) return done(read.status());
          if (demanded != 0 && *read != demanded) {
            return done(engine::MakeError(
                absl::StatusCode::kFailedPrecondition, engine::RejectReason::kWeightVersion, "weight_version",
                absl::StrCat("weight_version is ", demanded, "; the weights are of version ", *read)));
          }
          if (*version == 0) *version = *read;
          if (*version == *read) return done(absl::OkStatus());
          done(engine::MakeError(absl::StatusCode::kAborted, engine::RejectReason::kWeightWrite, "head",
                                 absl::StrCat("the weights went from version ", *version, " to ", *read,
                                              " while they were read; read them again")));
        });
  };
  source.encode = [type = *type, version](int64_t first_row, int64_t rows, const grpc::Slice& data,
                                          std::string bias) {
    v1::ReadWeightsResponse header;
    header.set_weight_version(*version);
    header.set_first_row(first_row);
    header.set_rows(rows);
    header.set_dtype(ToProto(type));
    header.set_bias(std::move(bias));
    return wire::Encode(header, data);
  };
  source.translate = [this](const absl::Status& status) { return ToGrpc(status, engine_->counters()); };
  absl::StatusOr<std::shared_ptr<const void>> room =
      engine_->TakeRowStream(*head, RowStreamReactor::MostBytes(source));
  if (!room.ok()) return fail(room.status());
  source.room = *std::move(room);
  return new RowStreamReactor(std::move(source));  // deletes itself when gRPC is done with it
}

grpc::ServerUnaryReactor* HeadService::LoadWeights(grpc::CallbackServerContext* /*context*/,
                                                   const v1::LoadWeightsRequest* request,
                                                   v1::LoadWeightsResponse* response) {
  auto* reactor = new LoadWeightsReactor;  // deletes itself when gRPC is done with it
  const absl::Status begun = loads_.TryRun([this, reactor, request, response] {
    const WeightSource source{.head = request->head(),
                              .path = request->path(),
                              .tensor = request->tensor(),
                              .bias_tensor = request->bias_tensor()};
    const absl::StatusOr<LoadedWeights> loaded =
        loader_.Load(source, [reactor] { return reactor->cancelled(); });
    if (loaded.ok()) {
      response->set_weight_version(loaded->weight_version);
      response->set_tensor(loaded->tensor);
    }
    reactor->Finish(ToGrpc(loaded.status(), engine_->counters()));
  });
  if (!begun.ok()) reactor->Finish(ToGrpc(begun, engine_->counters()));
  return reactor;
}

}  // namespace lossd::rpc
