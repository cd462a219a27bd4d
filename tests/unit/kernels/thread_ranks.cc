#include "tests/unit/kernels/thread_ranks.h"

#include <gtest/gtest.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "kernels/collectives/gloo_communicator.h"
#include "kernels/collectives/rendezvous.h"

namespace lossd::kernels::testing {
namespace {

// Threads meet in memory.
class MeetingPlace {
 public:
  explicit MeetingPlace(int32_t ranks) : ranks_(static_cast<size_t>(ranks)) {}

  collectives::Result Meet(size_t rank, size_t round, std::string own, std::chrono::milliseconds timeout,
                           std::vector<std::string>* all) {
    std::unique_lock lock(mutex_);
    if (rounds_.size() <= round) rounds_.resize(round + 1);
    rounds_[round].resize(ranks_);
    rounds_[round][rank] = std::move(own);
    changed_.notify_all();
    const auto is_whole = [&] {
      return std::all_of(rounds_[round].begin(), rounds_[round].end(),
                         [](const auto& said) { return said.has_value(); });
    };
    if (!changed_.wait_for(lock, timeout, is_whole)) {
      return {collectives::Code::kTimeout, "a rank did not come"};
    }
    all->clear();
    for (const std::optional<std::string>& said : rounds_[round]) all->push_back(*said);
    return {};
  }

 private:
  const size_t ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<std::optional<std::string>>> rounds_;
};

class ThreadRendezvous final : public collectives::Rendezvous {
 public:
  ThreadRendezvous(MeetingPlace& place, int32_t rank) : place_(place), rank_(static_cast<size_t>(rank)) {}

  collectives::Result AllGather(std::string own, std::chrono::milliseconds timeout,
                                std::vector<std::string>* all) override {
    return place_.Meet(rank_, round_++, std::move(own), timeout, all);
  }

 private:
  MeetingPlace& place_;
  const size_t rank_;
  size_t round_ = 0;
};

template <class T>
void Append(const std::vector<T>& more, std::vector<T>& all) {
  all.insert(all.end(), more.begin(), more.end());
}

}  // namespace

void MeetOnThreads(int32_t ranks, const MeetingBody& body) {
  MeetingPlace place(ranks);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&place, &body, rank] {
#ifdef _OPENMP
      omp_set_num_threads(2);  // ranks share the cores
#endif
      ThreadRendezvous rendezvous(place, rank);
      body(rank, rendezvous);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void RunOnThreads(int32_t ranks, const RankBody& body) {
  MeetOnThreads(ranks, [&](int32_t rank, collectives::Rendezvous& rendezvous) {
    std::unique_ptr<collectives::Communicator> communicator;
    const collectives::Result connected = ConnectGloo(
        {.rank = rank, .size = ranks, .timeout = std::chrono::seconds(100)}, rendezvous, &communicator);
    ASSERT_TRUE(connected.ok()) << connected.message();
    body(rank, communicator);
  });
}

std::vector<std::unique_ptr<collectives::Communicator>> ConnectRanks(int32_t ranks) {
  std::vector<std::unique_ptr<collectives::Communicator>> connected(static_cast<size_t>(ranks));
  RunOnThreads(ranks, [&](int32_t rank, std::unique_ptr<collectives::Communicator>& communicator) {
    connected[static_cast<size_t>(rank)] = std::move(communicator);
  });
  return connected;
}

Shard ShardOf(const ShardLayout& layout, const OverRanks& over, int32_t rank,
              collectives::Communicator* communicator) {
  Shard shard = layout.ShardOf(rank, over.segments, over.ranks == 1 ? nullptr : communicator);
  shard.answering_rank = over.answering_rank;
  return shard;
}

std::vector<std::vector<StepResult>> RunSteps(const std::vector<Problem>& problems, const OverRanks& over,
                                              const StepOptions& options) {
  std::vector<std::vector<StepResult>> results(problems.size(),
                                               std::vector<StepResult>(static_cast<size_t>(over.ranks)));
  RunOnThreads(over.ranks, [&](int32_t rank, std::unique_ptr<collectives::Communicator>& communicator) {
    for (size_t i = 0; i < problems.size(); ++i) {
      const ShardLayout layout(problems[i].shape.vocab, over.ranks);
      const Shard shard = ShardOf(layout, over, rank, communicator.get());
      StepOptions of_rank = options;
      of_rank.shard = &shard;
      results[i][static_cast<size_t>(rank)] = RunStep(problems[i], of_rank);
    }
  });
  return results;
}

StepResult Joined(const std::vector<StepResult>& of_ranks, const OverRanks& over) {
  StepResult joined = of_ranks[static_cast<size_t>(over.answering_rank)];
  joined.dw.clear();
  joined.db.clear();
  for (const StepResult& of_rank : of_ranks) {
    EXPECT_EQ(of_rank.status, joined.status);
    EXPECT_TRUE(of_rank.intact);
    EXPECT_EQ(of_rank.stats.valid_tokens, joined.stats.valid_tokens);
    EXPECT_EQ(of_rank.stats.rows_redone, joined.stats.rows_redone);
    Append(of_rank.dw, joined.dw);
    Append(of_rank.db, joined.db);
  }
  return joined;
}

}  // namespace lossd::kernels::testing
