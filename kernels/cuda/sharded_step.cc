#include "kernels/cuda/sharded_step.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "kernels/collectives/communicator.h"
#include "kernels/cuda/losses/smoothing.h"
#include "kernels/cuda/rows/bias.h"
#include "kernels/cuda/rows/row_returns.h"
#include "kernels/cuda/shard_returns.h"
#include "kernels/cuda/sm90/products.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int64_t kRowsOfCluster = 256;  // of a cluster's tile in every product
constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));

Result Travelled(const collectives::Result& result, const char* what) {
  if (result.ok()) return {};
  return {
      result.code() == collectives::Code::kInvalidArgument ? cudaErrorInvalidValue : cudaErrorExternalDevice,
      what};
}

// The entries of the segments that a workspace has room for. Fixed ones: of all, as if one rank had them, so
// that tiles are the same for any number of ranks. Otherwise of the largest, so that they are on all ranks.
std::vector<int64_t> EntriesToFit(const Shard& shard) {
  std::vector<int64_t> entries;
  for (int32_t i = 0; i < shard.segments(); ++i) entries.push_back(shard.entries(i));
  if (shard.division == Segments::kFixed) return entries;
  return {*std::max_element(entries.begin(), entries.end())};
}

// With room for one row in fp32 at least.
int64_t ExponentialBytes(const HeadShape& shape, int64_t entries, int64_t tile_rows) {
  return RoundUp(std::max<int64_t>(tile_rows, 2) * RoundUp(entries, 8) * SizeOf(shape.weight_type),
                 Divider::kAlignment);
}

}  // namespace

Result ShardStreams::Create(ShardStreams* streams, int32_t spared_multiprocessors) {
  streams->spared_multiprocessors_ = spared_multiprocessors;
  LOSSD_CUDA_PASS_ON(Stream::CreateUrgent(&streams->beside_));
  for (Event* event : {&streams->summed_, &streams->merged_, &streams->parted_, &streams->gathered_}) {
    LOSSD_CUDA_PASS_ON(Event::Create(event));
  }
  return {};
}

Result ShardStreams::Share(collectives::Communicator* communicator, void* memory, int64_t bytes) {
  if (flags_.data() == nullptr) LOSSD_CUDA_PASS_ON(CreateFlags(communicator));
  const int32_t neighbour = rank_ == 0 ? ranks_ - 1 : 0;
  if (At(neighbour, flags_.data()) == nullptr) return {};
  PeerMemory peers;
  LOSSD_CUDA_PASS_ON(PeerMemory::Create(communicator, memory, bytes, beside_.get(), &peers));
  peers_.push_back(std::move(peers));
  return {};
}

Result ShardStreams::CreateFlags(collectives::Communicator* communicator) {
  constexpr auto kBytes = static_cast<int64_t>(kMostRanks * sizeof(uint32_t));
  LOSSD_CUDA_PASS_ON(DeviceBuffer::Create(kBytes, &flags_));
  LOSSD_CUDA_TRY(cudaMemset(flags_.data(), 0, static_cast<size_t>(kBytes)));
  LOSSD_CUDA_TRY(cudaDeviceSynchronize());
  PeerMemory peers;
  LOSSD_CUDA_PASS_ON(PeerMemory::Create(communicator, flags_.data(), kBytes, beside_.get(), &peers));
  peers_.push_back(std::move(peers));
  rank_ = communicator->rank();
  ranks_ = communicator->size();
  return {};
}

Result ShardStreams::Meet() {
  ++meetings_;
  auto* flags = static_cast<uint32_t*>(flags_.data());
  for (int32_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    LOSSD_CUDA_PASS_ON(SetFlag(beside_.get(), At(rank, flags + rank_), meetings_));
  }
  for (int32_t rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_) LOSSD_CUDA_PASS_ON(AwaitFlag(beside_.get(), flags + rank, meetings_));
  }
  return {};
}

void* ShardStreams::At(int rank, const void* place) const {
  for (const PeerMemory& peers : peers_) {
    if (peers.Has(place)) return peers.At(rank, place);
  }
  return nullptr;
}

Result GatherSegments(const Shard& shard, ShardStreams* streams, void* all, int64_t bytes,
                      cudaStream_t stream) {
  if (shard.ranks() == 1) return {};
  cudaStream_t beside = streams->beside_.get();
  std::vector<int64_t> counts;
  for (int32_t rank = 0; rank < shard.ranks(); ++rank) {
    counts.push_back((shard.first_segment(rank + 1) - shard.first_segment(rank)) * bytes);
  }
  LOSSD_CUDA_TRY(cudaEventRecord(streams->summed_.get(), stream));
  LOSSD_CUDA_TRY(cudaStreamWaitEvent(beside, streams->summed_.get(), 0));
  const void* own = static_cast<const char*>(all) + shard.first_segment(shard.rank) * bytes;
  LOSSD_CUDA_PASS_ON(Travelled(shard.communicator->AllGatherV(own, counts, all, beside),
                               "gathering what segments have of rows"));
  LOSSD_CUDA_TRY(cudaEventRecord(streams->merged_.get(), beside));
  return streams->waits_.Await(stream, streams->merged_, Exchange::kRowStatistics);
}

Result SumSegments(const HeadShape& shape, const Shard& shard, const void* weight, const float* bias,
                   const float* class_weights, float* vocabulary_sums, double* bias_sums,
                   cudaStream_t stream) {
  const int64_t padded = PaddedHidden(shape.hidden);
  for (int32_t i = shard.first_segment(shard.rank); i < shard.first_segment(shard.rank + 1); ++i) {
    const int64_t first = shard.border(i) - shard.first();
    const void* rows = static_cast<const char*>(weight) + first * padded * SizeOf(shape.weight_type);
    const float* classes = class_weights == nullptr ? nullptr : class_weights + shard.border(i);
    LOSSD_CUDA_PASS_ON(
        SumVocabulary(shape.weight_type, rows, shard.entries(i), padded, classes, vocabulary_sums, stream));
    vocabulary_sums += padded;
    if (bias == nullptr) continue;
    LOSSD_CUDA_PASS_ON(SumBias(bias + first, shard.entries(i), classes, bias_sums++, stream));
  }
  return {};
}

int64_t ShardedStep::Divide(const HeadShape& shape, const Shard& shard, const TeacherShape* teacher,
                            int64_t tile_rows, void* base, Buffers* buffers) {
  Divider divider(base);
  Buffers& b = *buffers;
  const std::vector<int64_t> entries = EntriesToFit(shard);
  const int64_t most = *std::max_element(entries.begin(), entries.end());
  const int64_t x_bytes = tile_rows * PaddedHidden(shape.hidden) * SizeOf(shape.weight_type);
  const int64_t arrays = tile_rows * kFloatBytes;
  int64_t exponential_bytes = 0;
  for (const int64_t count : entries) exponential_bytes += ExponentialBytes(shape, count, tile_rows);
  divider.Take(&b.exponentials, exponential_bytes);
  // Returns of whole rows are told before scaled_x is made.
  divider.Take(&b.scaled_x,
               std::max(x_bytes, ShardReturns::Bytes(shard, std::min(tile_rows, ShardReturns::kMostRows))));
  // Maxima are done with before sums begin.
  divider.Take(&b.partials,
               arrays * std::max(sm90::MostMaximumTiles(most), CeilDivide(most, sm90::kLogitColumns)));
  divider.Take(&b.parts, arrays * shape.hidden * shard.segments());
  for (size_t set = 0; set < 2; ++set) {
    divider.Take(&b.x[set], x_bytes);
    for (size_t i = 0; i < entries.size(); ++i) {
      const int64_t before = divider.used();
      SegmentRows& rows = b.rows[set][i];
      rows.arrays.Take(tile_rows, &divider);
      PlacedLabels& labels = rows.labels;
      for (int32_t** array : {&labels.labels, &labels.weight_rows, &labels.places}) {
        divider.Take(array, arrays);
      }
      b.segment_stride = static_cast<int32_t>((divider.used() - before) / kFloatBytes);
    }
    divider.Take(&b.statistics[set],
                 shard.segments() * tile_rows * static_cast<int64_t>(sizeof(ShardStatistics)));
  }
  if (teacher != nullptr) b.soft.Take(entries, Path::kHopper, *teacher, &shard, tile_rows, &divider);
  return divider.used();
}

int64_t ShardedStep::WorkspaceBytes(const HeadShape& shape, const Shard& shard, const TeacherShape* teacher,
                                    int64_t tile_rows) {
  Buffers buffers;
  return Divide(shape, shard, teacher, tile_rows, nullptr, &buffers);
}

int64_t ShardedStep::RowsWithin(const HeadShape& shape, const Shard& shard, const TeacherShape* teacher,
                                int64_t workspace_bytes) {
  int64_t fits = 0;
  int64_t too_many = LinearCrossEntropy::kMostTileRows + 1;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (WorkspaceBytes(shape, shard, teacher, middle) <= workspace_bytes ? fits : too_many) = middle;
  }
  if (teacher != nullptr) return SoftLosses::InPieces(fits);
  return fits > kRowsOfCluster ? fits / kRowsOfCluster * kRowsOfCluster : fits;
}

Result ShardedStep::Check(const Batch& batch, const HeadShape& shape, Path path) {
  const Shard& shard = *batch.shard;
  if (path != Path::kHopper) return {cudaErrorNotSupported, "a vocabulary over ranks on the portable path"};
  const bool connected = shard.communicator != nullptr && batch.shard_streams != nullptr &&
                         shard.communicator->size() == shard.ranks() &&
                         shard.communicator->rank() == shard.rank;
  const bool divided = shard.division == Segments::kFixed ? shard.segments() == kFixedSegments
                                                          : shard.segments() == shard.ranks();
  if (shard.ranks() > kMostRanks || !divided || (shard.ranks() > 1 && !connected) ||
      shard.end() - shard.first() != shape.vocab || shape.vocab < 1) {
    return {cudaErrorInvalidValue, "a shard that is not this step's"};
  }
  return {};
}

ShardedStep::ShardedStep(const HeadShape& shape, const Batch& batch, int64_t most_rows, void* workspace,
                         const Observer& observer)
    : shape_(shape),
      batch_(batch),
      shard_(*batch.shard),
      streams_(batch.shard->ranks() > 1 ? batch.shard_streams : nullptr),
      most_rows_(most_rows),
      // fp16 reaches too few powers of two for an estimate of a row's maximum.
      maximum_(shape.weight_type == DataType::kFloat16 ? Maximum::kOfAll : Maximum::kOfSample),
      observer_(observer) {
  const TeacherShape teacher = batch.teacher == nullptr ? TeacherShape() : batch.teacher->shape();
  Divide(shape, shard_, batch.teacher == nullptr ? nullptr : &teacher, most_rows, workspace, &buffers_);
  ListSegments();
}

void ShardedStep::ListSegments() {
  char* exponentials = buffers_.exponentials;
  for (int32_t i = shard_.first_segment(shard_.rank); i < shard_.first_segment(shard_.rank + 1); ++i) {
    const int64_t entries = shard_.entries(i);
    if (entries == 0) continue;
    segments_.push_back({i, shard_.border(i) - shard_.first(), entries, RoundUp(entries, 8), exponentials});
    exponentials += ExponentialBytes(shape_, entries, most_rows_);
  }
}

OwnSegments ShardedStep::Own() const {
  OwnSegments own;
  own.stride = buffers_.segment_stride;
  for (const Segment& segment : segments_) own.borders[++own.count] = segment.first + segment.entries;
  return own;
}

Result ShardedStep::Wait(cudaStream_t stream, const Event& event) const {
  return {cudaStreamWaitEvent(stream, event.get(), 0), "waiting for what runs beside the products"};
}

Result ShardedStep::Run(int64_t tile_rows, cudaStream_t stream, cudaEvent_t input_gradients) {
  tile_rows_ = tile_rows;
  stream_ = stream;
  const bool soft = batch_.teacher != nullptr;
  if (!is_alone()) LOSSD_CUDA_PASS_ON(streams_->waits_.Tell(shard_.observer));
  if (batch_.rows > 0 && !soft) LOSSD_CUDA_PASS_ON(Begin(0));
  for (int64_t first = 0; first < batch_.rows; first += tile_rows) {
    const int64_t next = first + tile_rows;
    LOSSD_CUDA_PASS_ON(soft ? MakeSoftEntries(first) : MakeEntries(first));
    LOSSD_CUDA_PASS_ON(InputGradient(first));
    LOSSD_CUDA_PASS_ON(is_alone() ? AddAllParts(first) : Send(first));
    if (is_alone() && next >= batch_.rows) LOSSD_CUDA_PASS_ON(Record(input_gradients));
    if (batch_.weight_gradient != WeightGradient::kNone) LOSSD_CUDA_PASS_ON(AddWeightGradient(first));
    if (!is_alone()) LOSSD_CUDA_PASS_ON(AddAllParts(first));
  }
  return is_alone() && batch_.rows > 0 ? Result() : Record(input_gradients);
}

Result ShardedStep::Record(cudaEvent_t event) const {
  return {event == nullptr ? cudaSuccess : cudaEventRecord(event, stream_), "recording that dX is there"};
}

Result ShardedStep::MakeEntries(int64_t first) {
  const int64_t next = first + tile_rows_;
  if (batch_.returns.whole_row()) LOSSD_CUDA_PASS_ON(TellWholeRows(first));
  LOSSD_CUDA_PASS_ON(MakeExponentials(first));
  LOSSD_CUDA_PASS_ON(ShareStatistics(first));
  if (next < batch_.rows) LOSSD_CUDA_PASS_ON(Begin(next));
  return AwaitStatistics();
}

Result ShardedStep::MakeSoftEntries(int64_t first) {
  const TileRows tile = Describe(first);
  const PlacedLabels& labels = buffers_.rows[SetOf(first)][0].labels;
  const ShardReturns returns(shard_, streams_, batch_.returns, buffers_.scaled_x);
  const SoftLosses losses(Path::kHopper, most_rows_, buffers_.soft, nullptr, {&shard_, streams_, &returns});
  LOSSD_CUDA_PASS_ON(
      PlaceLabels(batch_.labels + first, tile.rows, shard_.first(), shape_.vocab, labels, stream_));
  LOSSD_CUDA_PASS_ON(losses.Prepare(batch_, tile, stream_));
  if (segments_.size() > 1) LOSSD_CUDA_PASS_ON(SplitRows(tile, Own(), labels, stream_));
  observer_.Report("prepare");
  return losses.Run(batch_, tile, PartsOf(first), stream_, observer_);
}

TileRows ShardedStep::Describe(int64_t first) const {
  const int64_t rows = std::min(tile_rows_, batch_.rows - first);
  const size_t set = SetOf(first);
  TileRows tile = LinearCrossEntropy::DescribeRows(shape_, Path::kHopper, batch_, first, rows);
  tile.labels = buffers_.rows[set][0].labels.labels;
  if (tile.classes.weights != nullptr) tile.classes.weights += shard_.first();
  tile.x = buffers_.x[set];
  tile.scaled_x = buffers_.scaled_x;
  buffers_.rows[set][0].arrays.GiveTo(&tile);
  if (!shard_.answers()) {
    tile.losses = nullptr;
    tile.returns = {};
  }
  return tile;
}

TileRows ShardedStep::Describe(int64_t first, size_t i) const {
  TileRows tile = Describe(first);
  const Segment& segment = segments_[i];
  const SegmentRows& rows = buffers_.rows[SetOf(first)][i];
  rows.arrays.GiveTo(&tile);
  tile.labels = rows.labels.labels;
  tile.vocab = segment.entries;
  tile.weight =
      static_cast<const char*>(tile.weight) + segment.first * tile.padded_hidden * SizeOf(shape_.weight_type);
  if (tile.bias != nullptr) tile.bias += segment.first;
  if (tile.classes.weights != nullptr) tile.classes.weights += segment.first;
  const int64_t place = segment.number - shard_.first_segment(shard_.rank);
  if (tile.classes.vocabulary_sum != nullptr) tile.classes.vocabulary_sum += place * tile.padded_hidden;
  if (tile.classes.bias_sum != nullptr) tile.classes.bias_sum += place;
  tile.statistics = buffers_.statistics[SetOf(first)] + segment.number * int64_t{tile.rows};
  return tile;
}

Result ShardedStep::Begin(int64_t first) {
  const TileRows tile = Describe(first);
  const PlacedLabels& labels = buffers_.rows[SetOf(first)][0].labels;
  LOSSD_CUDA_PASS_ON(
      PlaceLabels(batch_.labels + first, tile.rows, shard_.first(), shape_.vocab, labels, stream_));
  LOSSD_CUDA_PASS_ON(PrepareRows(tile, batch_.hidden_type, batch_.hidden_states, stream_));
  if (segments_.size() > 1) LOSSD_CUDA_PASS_ON(SplitRows(tile, Own(), labels, stream_));
  for (size_t i = 0; SmoothingOf(tile.options) == Smoothing::kRankOne && i < segments_.size(); ++i) {
    LOSSD_CUDA_PASS_ON(MultiplyVocabularySum(Describe(first, i), stream_));
  }
  observer_.Report("prepare");
  for (size_t i = 0; i < segments_.size(); ++i) {
    const TileRows part = Describe(first, i);
    const int32_t maxima = sm90::MaximumTiles(part.vocab, Which::kAll, maximum_);
    LOSSD_CUDA_PASS_ON(sm90::FindMaxima(part, Which::kAll, maximum_, buffers_.partials, most_rows_, stream_));
    LOSSD_CUDA_PASS_ON(
        ChooseExponents(part, Which::kAll, maximum_, buffers_.partials, maxima, most_rows_, stream_));
  }
  observer_.Report("offsets");
  return {};
}

std::vector<SegmentPart> ShardedStep::PartsOf(int64_t first) const {
  SegmentPart empty{.tile = Describe(first)};
  empty.tile.vocab = 0;
  std::vector<SegmentPart> parts(static_cast<size_t>(own_segments()), empty);
  const int32_t first_segment = shard_.first_segment(shard_.rank);
  for (int32_t i = 0; i < own_segments(); ++i) parts[static_cast<size_t>(i)].number = first_segment + i;
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    parts[static_cast<size_t>(segment.number - first_segment)] = {
        .tile = Describe(first, i),
        .number = segment.number,
        .first = segment.first,
        .stride = segment.stride,
        .entries = segment.exponentials,
        .logits = reinterpret_cast<float*>(segment.exponentials)};
  }
  return parts;
}

Result ShardedStep::TellWholeRows(int64_t first) {
  const ShardReturns returns(shard_, streams_, batch_.returns, buffers_.scaled_x);
  const TileRows tile = Describe(first);
  const std::vector<SegmentPart> parts = PartsOf(first);
  // As many as fit in fp32.
  const auto most = static_cast<int32_t>(std::clamp<int64_t>(most_rows_ / 2, 1, ShardReturns::kMostRows));
  for (int32_t begin = 0; begin < tile.rows; begin += most) {
    const int32_t rows = std::min(most, tile.rows - begin);
    for (const SegmentPart& part : parts) {
      if (part.tile.vocab == 0) continue;
      TileRows some = part.tile;
      some.rows = rows;
      some.x = static_cast<char*>(tile.x) + begin * tile.padded_hidden * SizeOf(tile.type);
      LOSSD_CUDA_PASS_ON(sm90::StoreLogits(some, part.logits, part.stride, stream_));
    }
    LOSSD_CUDA_PASS_ON(returns.Tell(tile, parts, begin, rows, stream_));
  }
  observer_.Report("returns");
  return {};
}

// E, or only its sums where E will be something else, and what the segment knows of rows.
Result ShardedStep::MultiplyLogits(const Segment& segment, const TileRows& tile, Which which) {
  float* const partials = buffers_.partials;
  SumPieces sums{.exponentials = partials,
                 .tiles = static_cast<int32_t>(CeilDivide(tile.vocab, sm90::kLogitColumns)),
                 .stride = most_rows_};
  if (tile.smoothing == Smoothing::kElementwise) {
    const sm90::EntrySums out = sm90::EntrySumsIn(segment.exponentials, partials, tile.vocab, most_rows_);
    sums.logits = tile.options.softcap == 0 ? nullptr : out.logits;
    sums.moments = out.moments;
    LOSSD_CUDA_PASS_ON(sm90::SumEntries(tile, which, out, stream_));
  } else {
    char* e = tile.gradient_wanted ? segment.exponentials : nullptr;
    LOSSD_CUDA_PASS_ON(sm90::MultiplyLogits(tile, which, {e, segment.stride, partials, most_rows_}, stream_));
  }
  if (which == Which::kAll) observer_.Report("logits");
  return FinishRows(tile, which, sums, stream_);
}

Result ShardedStep::MakeExponentials(int64_t first) {
  float* const partials = buffers_.partials;
  for (size_t i = 0; i < segments_.size(); ++i) {
    const TileRows tile = Describe(first, i);
    const int32_t maxima = sm90::MaximumTiles(tile.vocab, Which::kRedo, Maximum::kOfAll);
    LOSSD_CUDA_PASS_ON(MultiplyLogits(segments_[i], tile, Which::kAll));
    // Rows out of the segment's range, whose number only the device knows: with none of them these end at
    // once.
    LOSSD_CUDA_PASS_ON(GatherRedoRows(tile, stream_));
    LOSSD_CUDA_PASS_ON(sm90::FindMaxima(tile, Which::kRedo, Maximum::kOfAll, partials, most_rows_, stream_));
    LOSSD_CUDA_PASS_ON(
        ChooseExponents(tile, Which::kRedo, Maximum::kOfAll, partials, maxima, most_rows_, stream_));
    LOSSD_CUDA_PASS_ON(MultiplyLogits(segments_[i], tile, Which::kRedo));
    observer_.Report("rows");
  }
  return {};
}

Result ShardedStep::ShareStatistics(int64_t first) {
  if (is_alone()) return MergeStatistics(first, stream_);
  cudaStream_t beside = streams_->beside_.get();
  LOSSD_CUDA_TRY(cudaEventRecord(streams_->summed_.get(), stream_));
  LOSSD_CUDA_PASS_ON(Wait(beside, streams_->summed_));
  const int64_t rows = Describe(first).rows;
  ShardStatistics* all = buffers_.statistics[SetOf(first)];
  std::vector<int64_t> counts;
  for (int32_t rank = 0; rank < shard_.ranks(); ++rank) {
    counts.push_back(SegmentsOf(rank) * rows * static_cast<int64_t>(sizeof(ShardStatistics)));
  }
  const ShardStatistics* own = all + shard_.first_segment(shard_.rank) * rows;
  LOSSD_CUDA_PASS_ON(
      Travelled(shard_.communicator->AllGatherV(own, counts, all, beside), "exchanging statistics of rows"));
  LOSSD_CUDA_PASS_ON(MergeStatistics(first, beside));
  LOSSD_CUDA_TRY(cudaEventRecord(streams_->merged_.get(), beside));
  return {};
}

Result ShardedStep::MergeStatistics(int64_t first, cudaStream_t stream) {
  MergedSegments segments;
  segments.segments = shard_.segments();
  segments.sums = SumsWithin(segments.segments, 0, segments.segments);
  segments.stride = buffers_.segment_stride;
  for (int32_t i = 0; i < segments.segments; ++i) {
    if (shard_.entries(i) > 0) segments.with_entries |= SegmentBits{1} << i;
  }
  for (const Segment& segment : segments_) segments.own |= SegmentBits{1} << segment.number;
  const TileRows tile = Describe(first);
  LOSSD_CUDA_PASS_ON(MergeRows(tile, buffers_.statistics[SetOf(first)], segments, stream));
  return tile.returns.whole_row() ? ForgetOverflowedRows(tile, stream) : Result();
}

Result ShardedStep::AwaitStatistics() {
  if (is_alone()) return {};
  LOSSD_CUDA_PASS_ON(streams_->waits_.Await(stream_, streams_->merged_, Exchange::kRowStatistics));
  observer_.Report("wait for statistics");
  return {};
}

Result ShardedStep::InputGradient(int64_t first) {
  const TileRows tile = Describe(first);
  if (batch_.dx != nullptr && std::cmp_less(segments_.size(), own_segments())) {
    // What segments without entries have of dX.
    const int64_t bytes = tile.rows * tile.hidden * own_segments() * kFloatBytes;
    LOSSD_CUDA_TRY(cudaMemsetAsync(buffers_.parts, 0, static_cast<size_t>(bytes), stream_));
  }
  for (size_t i = 0; i < segments_.size(); ++i) LOSSD_CUDA_PASS_ON(InputGradient(first, i));
  return batch_.dx == nullptr || shard_.answers() ? Result() : AddOwnParts(tile);
}

Result ShardedStep::InputGradient(int64_t first, size_t i) {
  const Segment& segment = segments_[i];
  TileRows tile = Describe(first, i);
  const bool formed = batch_.teacher != nullptr;
  if (tile.smoothing == Smoothing::kElementwise && tile.gradient_wanted && !formed) {
    LOSSD_CUDA_PASS_ON(sm90::FormEntries(tile, segment.exponentials, segment.stride, stream_));
    observer_.Report("gradients");
  }
  if (batch_.dx == nullptr) return {};
  const PerSegment<SegmentRows>& rows = buffers_.rows[SetOf(first)];
  tile.labels = rows[i].labels.weight_rows;
  tile.batch_rows = rows[0].labels.places;
  const int64_t place = segment.number - shard_.first_segment(shard_.rank);
  LOSSD_CUDA_PASS_ON(sm90::MultiplyInputGradient(tile, segment.exponentials, segment.stride,
                                                 DataType::kFloat32,
                                                 buffers_.parts + place * tile.rows * tile.hidden, stream_));
  observer_.Report("dx");
  return {};
}

SegmentBits ShardedStep::UnsummedOf(int32_t rank) const {
  return UnsummedWithin(shard_.segments(), shard_.first_segment(rank), shard_.first_segment(rank + 1));
}

int64_t ShardedStep::PlaceOf(int32_t rank) const {
  int64_t place = SegmentsOf(shard_.answering_rank);
  for (int32_t before = 0; before < rank; ++before) {
    if (before != shard_.answering_rank) place += std::popcount(UnsummedOf(before));
  }
  return place;
}

InputGradientParts ShardedStep::OwnParts(const TileRows& tile) const {
  InputGradientParts parts;
  parts.segments = shard_.segments();
  const int32_t first = shard_.first_segment(shard_.rank);
  for (int32_t i = 0; i < own_segments(); ++i) {
    parts.of[first + i] = buffers_.parts + tile.rows * tile.hidden * i;
  }
  return parts;
}

Result ShardedStep::AddOwnParts(const TileRows& tile) {
  InputGradientParts parts = OwnParts(tile);
  const int32_t first = shard_.first_segment(shard_.rank);
  parts.sums = SumsWithin(parts.segments, first, first + own_segments());
  if (parts.sums == 0) return {};
  LOSSD_CUDA_PASS_ON(AddParts(tile, parts, UnsummedOf(shard_.rank), buffers_.parts, stream_));
  observer_.Report("sum of own parts");
  return {};
}

// Parts of dX to the rank that answers.
Result ShardedStep::Send(int64_t first) {
  if (!SendsParts()) return {};
  cudaStream_t beside = streams_->beside_.get();
  LOSSD_CUDA_TRY(cudaEventRecord(streams_->parted_.get(), stream_));
  LOSSD_CUDA_PASS_ON(Wait(beside, streams_->parted_));
  LOSSD_CUDA_PASS_ON(SendParts(Describe(first)));
  if (PartsAreCopied()) LOSSD_CUDA_PASS_ON(streams_->Meet());
  LOSSD_CUDA_TRY(cudaEventRecord(streams_->gathered_.get(), beside));
  return {};
}

Result ShardedStep::SendParts(const TileRows& tile) {
  cudaStream_t beside = streams_->beside_.get();
  const int64_t part = tile.rows * tile.hidden;
  const bool answers = shard_.answers();
  std::vector<int64_t> sent;
  std::vector<int64_t> received;
  for (int32_t rank = 0; rank < shard_.ranks(); ++rank) {
    const int64_t own_bytes = std::popcount(UnsummedOf(shard_.rank)) * part * kFloatBytes;
    const int64_t bytes = std::popcount(UnsummedOf(rank)) * part * kFloatBytes;
    sent.push_back(!answers && rank == shard_.answering_rank ? own_bytes : 0);
    received.push_back(answers && rank != shard_.rank ? bytes : 0);
  }
  float* const behind_own = buffers_.parts + own_segments() * part;
  if (!PartsAreCopied()) {
    return Travelled(shard_.communicator->AllToAllV(buffers_.parts, sent, behind_own, received, beside),
                     "sending parts of dX");
  }
  if (answers) return {};
  void* there = streams_->At(shard_.answering_rank, buffers_.parts + PlaceOf(shard_.rank) * part);
  const auto bytes = static_cast<size_t>(sent[static_cast<size_t>(shard_.answering_rank)]);
  LOSSD_CUDA_TRY(cudaMemcpyAsync(there, buffers_.parts, bytes, cudaMemcpyDefault, beside));
  return {};
}

// In the products' stream, with all of the device: beside a product the sum takes as long as it gets few
// multiprocessors.
Result ShardedStep::AddAllParts(int64_t first) {
  if (SendsParts()) {
    LOSSD_CUDA_PASS_ON(streams_->waits_.Await(stream_, streams_->gathered_, Exchange::kInputGradients));
    observer_.Report("wait for parts");
  }
  if (batch_.dx == nullptr || batch_.rows == 0 || !shard_.answers()) return {};
  const TileRows tile = Describe(first);
  InputGradientParts parts = OwnParts(tile);
  parts.sums = SumsWithin(parts.segments, 0, parts.segments);
  int64_t place = own_segments();
  for (int32_t rank = 0; rank < shard_.ranks(); ++rank) {
    if (rank == shard_.rank) continue;
    parts.sums &= ~SumsWithin(parts.segments, shard_.first_segment(rank), shard_.first_segment(rank + 1));
    for (int32_t i = 0; i < parts.segments; ++i) {
      if (Has(UnsummedOf(rank), i)) parts.of[i] = buffers_.parts + place++ * tile.rows * tile.hidden;
    }
  }
  LOSSD_CUDA_PASS_ON(AddInputGradients(tile, parts, batch_.dx_type, batch_.dx, stream_));
  observer_.Report("sum");
  return {};
}

Result ShardedStep::AddWeightGradient(int64_t first) {
  for (size_t i = 0; i < segments_.size(); ++i) LOSSD_CUDA_PASS_ON(AddWeightGradient(first, i));
  const TileRows tile = Describe(first);
  if (tile.smoothing != Smoothing::kRankOne) return {};
  LOSSD_CUDA_PASS_ON(AddSmoothing(tile, first == 0 ? batch_.smoothing_store : WeightGradient::kAccumulate,
                                  batch_.smoothing_gradient, stream_));
  observer_.Report("smoothing");
  return {};
}

Result ShardedStep::AddWeightGradient(int64_t first, size_t i) {
  const Segment& segment = segments_[i];
  TileRows tile = Describe(first, i);
  const bool overwrite = first == 0 && batch_.weight_gradient == WeightGradient::kOverwrite;
  LOSSD_CUDA_PASS_ON(ScaleRows(tile, stream_));
  if (SendsParts() && !PartsAreCopied()) tile.spared_multiprocessors = streams_->spared_multiprocessors_;
  const sm90::Store store = overwrite ? sm90::Store::kOverwrite : sm90::Store::kAdd;
  float* dw = batch_.dw + segment.first * tile.padded_hidden;
  LOSSD_CUDA_PASS_ON(
      sm90::MultiplyWeightGradient(tile, segment.exponentials, segment.stride, store, dw, stream_));
  observer_.Report("dw");
  LOSSD_CUDA_PASS_ON(AddTargets(tile, dw, stream_));
  observer_.Report("targets");
  float* db = batch_.db == nullptr ? nullptr : batch_.db + segment.first;
  LOSSD_CUDA_PASS_ON(StoreBiasGradient(tile, segment.exponentials, segment.stride, overwrite, db, stream_));
  if (tile.bias != nullptr) observer_.Report("bias");
  return {};
}

}  // namespace lossd::kernels::cuda
