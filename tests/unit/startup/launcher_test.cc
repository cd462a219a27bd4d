#include "server/startup/group/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

namespace lossd::launcher_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

using Variables = std::map<std::string, std::string>;

Environment With(Variables variables) {
  return [variables = std::move(variables)](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return {};
    return found->second;
  };
}

NodePlace Found(const std::string& launcher, const Variables& variables, const GivenPlace& given = {}) {
  const absl::StatusOr<NodePlace> place = FindPlace(launcher, given, With(variables));
  EXPECT_TRUE(place.ok()) << place.status();
  return place.value_or(NodePlace());
}

std::string WhyNot(const std::string& launcher, const Variables& variables, const GivenPlace& given = {}) {
  const absl::Status status = FindPlace(launcher, given, With(variables)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

void ExpectPlace(const NodePlace& place, const NodePlace& expected) {
  EXPECT_EQ(place.node, expected.node);
  EXPECT_EQ(place.nodes, expected.nodes);
  EXPECT_EQ(place.leader, expected.leader);
  EXPECT_EQ(place.local_index, expected.local_index);
  EXPECT_EQ(place.local_count, expected.local_count);
}

// Variables as the launchers set them.

const Variables kLws = {
    {"LWS_GROUP_SIZE", "2"}, {"LWS_WORKER_INDEX", "1"}, {"LWS_LEADER_ADDRESS", "lossd-0.lossd.training"}};

// The second of two on the second host: torchrun --nnodes=2 --nproc-per-node=2.
const Variables kTorchrun = {{"LOCAL_RANK", "1"},          {"RANK", "3"},
                             {"GROUP_RANK", "1"},          {"ROLE_RANK", "3"},
                             {"ROLE_NAME", "default"},     {"LOCAL_WORLD_SIZE", "2"},
                             {"WORLD_SIZE", "4"},          {"GROUP_WORLD_SIZE", "2"},
                             {"ROLE_WORLD_SIZE", "4"},     {"MASTER_ADDR", "node-a.example"},
                             {"MASTER_PORT", "45123"},     {"TORCHELASTIC_RESTART_COUNT", "0"},
                             {"TORCHELASTIC_RUN_ID", "7"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}};

// The last of `srun -N4 -n7`, whose last host has one task.
const Variables kSrun = {{"SLURM_JOB_ID", "81"},
                         {"SLURM_JOB_NODELIST", "gpu[01-03,7]"},
                         {"SLURM_JOB_NUM_NODES", "4"},
                         {"SLURM_NTASKS", "7"},
                         {"SLURM_NPROCS", "7"},
                         {"SLURM_STEP_NUM_TASKS", "7"},
                         {"SLURM_STEP_NODELIST", "gpu[01-03,7]"},
                         {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
                         {"SLURM_TASKS_PER_NODE", "2(x3),1"},
                         {"SLURM_NODEID", "3"},
                         {"SLURM_PROCID", "6"},
                         {"SLURM_LOCALID", "0"}};

const Variables kMpirun = {{"OMPI_COMM_WORLD_SIZE", "4"},
                           {"OMPI_COMM_WORLD_RANK", "2"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                           {"OMPI_COMM_WORLD_NODE_RANK", "0"},
                           {"OMPI_UNIVERSE_SIZE", "4"},
                           {"PMIX_RANK", "2"}};

TEST(Launcher, APodIsANode) {
  ExpectPlace(Found("lws", kLws), {.node = 1, .nodes = 2, .leader = "lossd-0.lossd.training:50053"});
}

TEST(Launcher, EachProcessOfTorchrunIsANodeAndItsPortIsNotOurs) {
  ExpectPlace(Found("torchrun", kTorchrun),
              {.node = 3, .nodes = 4, .leader = "node-a.example:50053", .local_index = 1, .local_count = 2});
}

TEST(Launcher, EachTaskOfAStepIsANodeAndTheFirstHostLeads) {
  ExpectPlace(Found("slurm", kSrun), {.node = 6, .nodes = 7, .leader = "gpu01:50053", .local_count = 1});
  Variables second = kSrun;
  second["SLURM_NODEID"] = "1";
  second["SLURM_PROCID"] = "3";
  second["SLURM_LOCALID"] = "1";
  ExpectPlace(Found("slurm", second),
              {.node = 3, .nodes = 7, .leader = "gpu01:50053", .local_index = 1, .local_count = 2});
}

TEST(Launcher, AStepMaySayLessThanItsJob) {
  Variables job = kSrun;
  for (const char* name : {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"}) {
    job.erase(name);
  }
  ExpectPlace(Found("slurm", job), {.node = 6, .nodes = 7, .leader = "gpu01:50053", .local_count = 1});
}

TEST(Launcher, SlurmSaysWhetherEachTaskSeesItsOwnGpus) {
  EXPECT_FALSE(Found("slurm", kSrun).own_gpus);
  Variables own = kSrun;
  own["SLURM_GPUS_PER_TASK"] = "2";
  EXPECT_TRUE(Found("slurm", own).own_gpus);
  EXPECT_FALSE(Found("torchrun", kTorchrun).own_gpus);
}

TEST(Launcher, OpenMpiDoesNotSayWhoLeads) {
  EXPECT_THAT(WhyNot("ompi", kMpirun), HasSubstr("--group_leader=HOST"));
  ExpectPlace(Found("ompi", kMpirun, {.node = {}, .nodes = {}, .leader = "10.0.0.1:7000"}),
              {.node = 2, .nodes = 4, .leader = "10.0.0.1:7000", .local_count = 2});
}

TEST(Launcher, AFlagThatIsGivenWins) {
  ExpectPlace(Found("lws", kLws, {.node = 2, .nodes = 3, .leader = "other"}),
              {.node = 2, .nodes = 3, .leader = "other:50053"});
  ExpectPlace(Found("flags", {}, {.node = 0, .nodes = 2, .leader = "a:1"}),
              {.node = 0, .nodes = 2, .leader = "a:1"});
}

TEST(Launcher, LooksAtNoVariableOfOthers) {
  Variables all;
  for (const Variables& variables : {kLws, kTorchrun, kSrun, kMpirun}) {
    all.insert(variables.begin(), variables.end());
  }
  const auto asked_by = [&all](const std::string& launcher) {
    std::set<std::string> asked;
    const auto environment = [&](const char* name) {
      asked.insert(name);
      return With(all)(name);
    };
    GivenPlace given;
    if (launcher == "flags") given = {.node = 0, .nodes = 2, .leader = "a"};
    if (launcher == "ompi") given.leader = "a";
    EXPECT_TRUE(FindPlace(launcher, given, environment).ok()) << launcher;
    return asked;
  };
  EXPECT_THAT(asked_by("flags"), IsEmpty());
  EXPECT_THAT(asked_by("lws"), Each(StartsWith("LWS_")));
  EXPECT_THAT(asked_by("slurm"), Each(StartsWith("SLURM_")));
  EXPECT_THAT(asked_by("ompi"), Each(StartsWith("OMPI_COMM_WORLD_")));
  EXPECT_THAT(asked_by("torchrun"),
              ElementsAre("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "RANK", "WORLD_SIZE"));
}

TEST(Launcher, NamesWhatIsMissingAndWhoSetsIt) {
  const std::vector<std::tuple<std::string, Variables, std::vector<std::string>, std::string>> cases = {
      {"lws", kLws, {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"}, "LeaderWorkerSet"},
      {"torchrun",
       kTorchrun,
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"},
       "torchrun --no-python"},
      {"slurm", kSrun, {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"}, "srun"},
      {"ompi",
       kMpirun,
       {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE"},
       "mpirun"},
  };
  for (const auto& [launcher, variables, names, who] : cases) {
    for (const std::string& name : names) {
      Variables less = variables;
      less.erase(name);
      GivenPlace given;
      if (launcher == "ompi") given.leader = "a";
      EXPECT_THAT(WhyNot(launcher, less, given), AllOf(HasSubstr(name + " is not set"), HasSubstr(who)));
    }
  }
  EXPECT_THAT(WhyNot("flags", {}, {.node = {}, .nodes = 2, .leader = "a"}), HasSubstr("--group_node"));
  EXPECT_THAT(WhyNot("flags", {}, {.node = 0, .nodes = {}, .leader = "a"}), HasSubstr("--group_nodes"));
  EXPECT_THAT(WhyNot("flags", {}, {.node = 0, .nodes = 2, .leader = ""}), HasSubstr("--group_leader"));
  EXPECT_THAT(WhyNot("mpi", {}), AllOf(HasSubstr("'mpi'"), HasSubstr("torchrun, slurm, ompi")));
}

TEST(Launcher, RefusesPlacesThatAreNone) {
  EXPECT_THAT(WhyNot("flags", {}, {.node = 2, .nodes = 2, .leader = "a"}),
              AllOf(HasSubstr("node 2 of 2"), HasSubstr("from 0 to 1")));
  EXPECT_THAT(WhyNot("flags", {}, {.node = -1, .nodes = 2, .leader = "a"}), HasSubstr("node -1 of 2"));
  EXPECT_THAT(WhyNot("flags", {}, {.node = 0, .nodes = 0, .leader = "a"}), HasSubstr("0 nodes"));
  Variables words = kLws;
  words["LWS_WORKER_INDEX"] = "first";
  EXPECT_THAT(WhyNot("lws", words), HasSubstr("LWS_WORKER_INDEX is 'first'"));
  Variables job = kSrun;
  job.erase("SLURM_STEP_NUM_TASKS");
  job["SLURM_NTASKS"] = "many";
  EXPECT_THAT(WhyNot("slurm", job), HasSubstr("SLURM_NTASKS is 'many'"));
  job = kSrun;
  job.erase("SLURM_STEP_NODELIST");
  job["SLURM_JOB_NODELIST"] = "a:b";
  EXPECT_THAT(WhyNot("slurm", job), HasSubstr("SLURM_JOB_NODELIST is 'a:b'"));
  Variables outside = kTorchrun;
  outside["LOCAL_RANK"] = "2";
  EXPECT_THAT(WhyNot("torchrun", outside), HasSubstr("LOCAL_RANK is 2 of 2"));
}

TEST(Launcher, ALeaderHasAHostAndMayHaveAPort) {
  const auto leader = [](const std::string& text) {
    return Found("flags", {}, {.node = 0, .nodes = 2, .leader = text}).leader;
  };
  EXPECT_EQ(leader("node-0.example"), "node-0.example:50053");
  EXPECT_EQ(leader("10.0.0.1:7"), "10.0.0.1:7");
  EXPECT_EQ(leader("[fd00::1]:7"), "[fd00::1]:7");
  EXPECT_EQ(leader("[fd00::1]"), "[fd00::1]:50053");
  EXPECT_EQ(leader("fd00::1"), "[fd00::1]:50053");
  for (const std::string text :
       {"a:0", "a:65536", "a:b", "a:", ":7", "[fd00::1", "a,b", "a b", "unix:/x/y", "[]", "http://a"}) {
    EXPECT_THAT(WhyNot("flags", {}, {.node = 0, .nodes = 2, .leader = text}),
                HasSubstr("--group_leader is '" + text + "'"))
        << text;
  }
}

TEST(SlurmHosts, TheFirstOfAListLeads) {
  for (const auto& [list, host] :
       std::vector<std::pair<std::string, std::string>>{{"n1", "n1"},
                                                        {"n[01-03,7],m2", "n01"},
                                                        {"a[01-03,7]-x,b2", "a01-x"},
                                                        {"m2,n[01-03]", "m2"},
                                                        {"r[2-3]n[004,7]", "r2n004"},
                                                        {"n[12]", "n12"}}) {
    EXPECT_EQ(FirstHost(list).value_or("none"), host) << list;
  }
  for (const char* list : {"", ",a", "n[", "n[]", "n[x-3]", "n[1-2", "n[-2]"}) {
    EXPECT_EQ(FirstHost(list).status().code(), absl::StatusCode::kInvalidArgument) << list;
  }
}

TEST(SlurmHosts, EachHasItsNumberOfTasks) {
  EXPECT_EQ(TasksOfHost("4", 0).value_or(-1), 4);
  EXPECT_EQ(TasksOfHost("2(x3),1", 0).value_or(-1), 2);
  EXPECT_EQ(TasksOfHost("2(x3),1", 2).value_or(-1), 2);
  EXPECT_EQ(TasksOfHost("2(x3),1", 3).value_or(-1), 1);
  EXPECT_EQ(TasksOfHost("8(x2000000000)", 1999999999).value_or(-1), 8);
  for (const auto& [list, index] : std::vector<std::pair<std::string, int32_t>>{{"2(x3),1", 4},
                                                                                {"", 0},
                                                                                {"two", 0},
                                                                                {"2(x", 0},
                                                                                {"2(x0)", 0},
                                                                                {"2(3)", 0},
                                                                                {"0", 0},
                                                                                {"2(x-1)", 1}}) {
    EXPECT_EQ(TasksOfHost(list, index).status().code(), absl::StatusCode::kInvalidArgument) << list;
  }
}

}  // namespace
}  // namespace lossd::launcher_test
