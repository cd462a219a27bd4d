#include "client/tools/perf/stages.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace lossd::perf {
namespace {

using Time = ChunkTiming::Time;

double Seconds(Time::duration duration) { return std::chrono::duration<double>(duration).count(); }

struct Interval {
  Time begin;
  Time end;
};

// Ascending and disjoint.
std::vector<Interval> Union(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> all;
  for (const Interval& one : intervals) {
    if (one.end <= one.begin) continue;
    if (!all.empty() && one.begin <= all.back().end) {
      all.back().end = std::max(all.back().end, one.end);
    } else {
      all.push_back(one);
    }
  }
  return all;
}

std::vector<Interval> Computing(std::span<const ChunkTiming> timings) {
  std::vector<Interval> computing;
  std::vector<const ChunkTiming*> in_order;
  for (const ChunkTiming& timing : timings) {
    computing.push_back({timing.compute_started, timing.computed});
    in_order.push_back(&timing);
  }
  std::sort(in_order.begin(), in_order.end(),
            [](const ChunkTiming* a, const ChunkTiming* b) { return a->computed < b->computed; });
  // The dW of a batch is computed from the end of its dX (`computed`) to the `earlier_done` that the next
  // batch reports. Chunks of one batch report the same `earlier_done`, which is before their own dX: between
  // two of them the interval is empty and counts for nothing.
  for (size_t i = 1; i < in_order.size(); ++i) {
    if (in_order[i]->earlier_done.has_value()) {
      computing.push_back({in_order[i - 1]->computed, *in_order[i]->earlier_done});
    }
  }
  return Union(std::move(computing));
}

Time::duration Overlap(const Interval& interval, std::span<const Interval> disjoint) {
  Time::duration sum{0};
  auto it = std::upper_bound(disjoint.begin(), disjoint.end(), interval.begin,
                             [](Time begin, const Interval& one) { return begin < one.end; });
  for (; it != disjoint.end() && it->begin < interval.end; ++it) {
    sum += std::min(it->end, interval.end) - std::max(it->begin, interval.begin);
  }
  return sum;
}

}  // namespace

StageSamples SplitIntoStages(std::span<const ChunkTiming> timings) {
  StageSamples samples;
  for (const ChunkTiming& chunk : timings) {
    samples.upload.push_back(Seconds(chunk.received - chunk.sent));
    samples.queue.push_back(
        Seconds((chunk.started - chunk.received) + (chunk.compute_started - chunk.input_ready)));
    samples.copy.push_back(
        Seconds((chunk.input_ready - chunk.started) + (chunk.output_ready - chunk.computed)));
    samples.compute.push_back(Seconds(chunk.computed - chunk.compute_started));
    samples.download.push_back(Seconds(chunk.arrived - chunk.output_ready));
    samples.clock_error =
        std::max(samples.clock_error, std::chrono::duration<double>(chunk.clock_error).count());
  }
  return samples;
}

std::optional<double> HiddenShare(std::span<const ChunkTiming> timings) {
  const std::vector<Interval> computing = Computing(timings);
  Time::duration moving{0};
  Time::duration hidden{0};
  for (const ChunkTiming& chunk : timings) {
    for (const Interval& way :
         {Interval{chunk.sent, chunk.received}, Interval{chunk.started, chunk.input_ready},
          Interval{chunk.computed, chunk.output_ready}, Interval{chunk.output_ready, chunk.arrived}}) {
      if (way.end <= way.begin) continue;
      moving += way.end - way.begin;
      hidden += Overlap(way, computing);
    }
  }
  if (moving.count() == 0) return std::nullopt;
  return Seconds(hidden) / Seconds(moving);
}

}  // namespace lossd::perf
