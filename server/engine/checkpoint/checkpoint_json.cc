#include "server/engine/checkpoint/checkpoint_json.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace lossd::engine {
namespace {

using nlohmann::json;
using Lane = AccumulationLedger::Lane;
using Session = AccumulationLedger::Session;
using SessionState = AccumulationLedger::SessionState;

constexpr size_t kMostLanes = 1 << 16;

[[noreturn]] void Refuse(absl::string_view what) { throw std::invalid_argument(std::string(what)); }

// JSON cannot express numbers that are not finite.
json FromDouble(double value) { return std::isfinite(value) ? json(value) : json(absl::StrCat(value)); }
double ToDouble(const json& value) {
  if (!value.is_string()) return value.get<double>();
  double number = 0;
  if (!absl::SimpleAtod(value.get<std::string>(), &number)) Refuse("a number is none");
  return number;
}
float ToFloat(const json& value) { return static_cast<float>(ToDouble(value)); }

// The library would make an unsigned number of a negative one.
uint64_t ToUnsigned(const json& value) {
  if (!value.is_number_unsigned()) Refuse(absl::StrCat(value.dump(), " is no number from 0 on"));
  return value.get<uint64_t>();
}

int32_t ToInt32(const json& value) {
  return static_cast<int32_t>(
      ToInteger(value, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
}

template <typename Enum>
Enum ToEnum(const json& value, Enum last) {
  const int64_t number = ToCount(value);
  if (number > static_cast<int64_t>(last)) Refuse(absl::StrCat(number, " is no kind that there is"));
  return static_cast<Enum>(number);
}

template <typename T, typename From>
json FromOptional(const std::optional<T>& value, From from) {
  return value.has_value() ? from(*value) : json(nullptr);
}
template <typename T>
std::optional<T> ToOptional(const json& value, T (*to)(const json&)) {
  if (value.is_null()) return std::nullopt;
  return to(value);
}

// Configuration

kernels::DataType ToType(const json& value) {
  for (const kernels::DataType type :
       {kernels::DataType::kBFloat16, kernels::DataType::kFloat16, kernels::DataType::kFloat32}) {
    if (value == kernels::Name(type)) return type;
  }
  Refuse(absl::StrCat(value.dump(), " is no dtype"));
}

json FromValue(const OptimizerConfig& optimizer);
json FromValue(kernels::DataType type) { return kernels::Name(type); }
json FromValue(WeightGradients gradients) { return gradients == WeightGradients::kFrozen; }
json FromValue(OptimizerKind kind) { return static_cast<int>(kind); }
template <typename Value>
json FromValue(const Value& value) {
  return value;
}

template <typename Fields, typename Config>
json FromFields(const Fields& fields, const Config& config) {
  json object = json::object();
  ForEachField(fields, [&](const auto& field) { object[field.name] = FromValue(config.*field.value); });
  return object;
}

json FromValue(const OptimizerConfig& optimizer) { return FromFields(kOptimizerFields, optimizer); }
json ToJson(const HeadConfig& config) { return FromFields(kHeadFields, config); }

void Read(const json& from, OptimizerConfig* optimizer);
void Read(const json& from, std::string* text) { *text = from.get<std::string>(); }
void Read(const json& from, int64_t* count) { *count = ToCount(from); }
void Read(const json& from, float* number) { *number = ToFloat(from); }
void Read(const json& from, double* number) { *number = from.get<double>(); }
void Read(const json& from, bool* flag) { *flag = from.get<bool>(); }
void Read(const json& from, kernels::DataType* type) { *type = ToType(from); }
void Read(const json& from, OptimizerKind* kind) { *kind = ToEnum(from, OptimizerKind::kAdamW); }
void Read(const json& from, WeightGradients* gradients) {
  *gradients = from.get<bool>() ? WeightGradients::kFrozen : WeightGradients::kAccumulated;
}

template <typename Fields, typename Config>
void ReadFields(const json& from, const Fields& fields, Config* config) {
  ForEachField(fields, [&](const auto& field) { Read(from.at(field.name), &(config->*field.value)); });
}

void Read(const json& from, OptimizerConfig* optimizer) { ReadFields(from, kOptimizerFields, optimizer); }

// Ledger

json ToJson(const HeadPast& past) { return {{"incarnation", past.incarnation}, {"restores", past.restores}}; }

HeadPast PastFromJson(const json& from) {
  return {from.at("incarnation").get<std::string>(), ToUnsigned(from.at("restores"))};
}

json ToJson(const std::vector<SessionMarks>& marks) {
  json all = json::array();
  for (const SessionMarks& session : marks) {
    json lanes = json::array();
    for (const LaneMarks& lane : session.lanes) lanes.push_back({lane.lane, lane.accepted});
    all.push_back({{"session", session.session_id}, {"lanes", std::move(lanes)}});
    if (session.past.known()) all.back()["past"] = ToJson(session.past);
  }
  return all;
}

std::vector<SessionMarks> MarksFromJson(const json& from) {
  std::vector<SessionMarks> marks;
  for (const auto& session : from) {
    SessionMarks& entry = marks.emplace_back();
    entry.session_id = session.at("session").get<std::string>();
    for (const auto& lane : session.at("lanes")) {
      entry.lanes.push_back({ToInt32(lane.at(0)), ToUnsigned(lane.at(1)), 0});
    }
    if (session.contains("past")) entry.past = PastFromJson(session.at("past"));
  }
  return marks;
}

json ToJson(const std::vector<Ancestor>& ancestors) {
  json all = json::array();
  for (const Ancestor& ancestor : ancestors) {
    all.push_back({{"past", ToJson(ancestor.past)},
                   {"generation", ancestor.generation},
                   {"marks", ToJson(ancestor.marks)}});
  }
  return all;
}

std::vector<Ancestor> AncestorsFromJson(const json& from) {
  std::vector<Ancestor> ancestors;
  for (const auto& ancestor : from) {
    ancestors.push_back({PastFromJson(ancestor.at("past")), ToUnsigned(ancestor.at("generation")),
                         MarksFromJson(ancestor.at("marks"))});
  }
  return ancestors;
}

json ToJson(const SessionCheckpoint& checkpoint) {
  const Session& session = checkpoint.session;
  json lanes = json::array();
  for (const Lane& lane : session.lanes) {
    lanes.push_back({{"accepted", lane.accepted},
                     {"base", lane.base},
                     {"next_base", lane.next_base},
                     {"rejected", lane.rejected},
                     {"only_looked", lane.only_looked()}});
  }
  json result = {{"id", checkpoint.id},
                 {"number", session.number},
                 {"client_key", session.client_key},
                 {"rank", session.rank},
                 {"open", session.state == SessionState::kOpen},
                 {"lanes", std::move(lanes)}};
  if (checkpoint.tiles.has_value()) result["tiles"] = ToJson(*checkpoint.tiles);
  return result;
}

Lane LaneFromJson(const json& from) {
  Lane lane;
  lane.accepted = lane.started = lane.applied = static_cast<uint64_t>(ToCount(from.at("accepted")));
  lane.base = ToUnsigned(from.at("base"));
  lane.next_base = ToUnsigned(from.at("next_base"));
  for (const auto& sequence : from.at("rejected")) lane.rejected.push_back(ToUnsigned(sequence));
  for (size_t i = 0; i < lane.rejected.size(); ++i) {
    const bool ascends = i == 0 || lane.rejected[i - 1] < lane.rejected[i];
    if (!ascends || lane.rejected[i] > lane.accepted) Refuse("rejected sequences are out of order");
  }
  if (lane.base > lane.accepted || lane.next_base > lane.accepted) {
    Refuse("a lane's marks contradict each other");
  }
  lane.added = from.at("only_looked").get<bool>() ? lane.base : lane.accepted;
  return lane;
}

SessionCheckpoint SessionFromJson(const json& from) {
  SessionCheckpoint checkpoint;
  checkpoint.id = from.at("id").get<std::string>();
  Session& session = checkpoint.session;
  session.number = ToUnsigned(from.at("number"));
  session.client_key = from.at("client_key").get<std::string>();
  session.rank = ToInt32(from.at("rank"));
  if (!from.at("open").get<bool>()) session.state = SessionState::kClosed;
  for (const auto& lane : from.at("lanes")) session.lanes.push_back(LaneFromJson(lane));
  if (session.lanes.empty() || session.lanes.size() > kMostLanes) {
    Refuse("a session has no lanes, or too many");
  }
  if (from.contains("tiles")) checkpoint.tiles = TilesFromJson(from.at("tiles"));
  return checkpoint;
}

// Window

json ToJson(const GradientStats& stats) {
  return {{"norm", FromDouble(stats.norm)},
          {"bias_norm", FromDouble(stats.bias_norm)},
          {"largest", FromDouble(stats.largest)},
          {"non_finite", stats.non_finite}};
}

GradientStats StatsFromJson(const json& from) {
  return {.norm = ToDouble(from.at("norm")),
          .bias_norm = ToDouble(from.at("bias_norm")),
          .largest = ToFloat(from.at("largest")),
          .non_finite = ToCount(from.at("non_finite"))};
}

json ToJson(const FlushInfo& flush) {
  return {{"id", flush.flush_id},
          {"rows", flush.rows},
          {"columns", flush.columns},
          {"tokens", flush.window_tokens},
          {"stats", ToJson(flush.stats)}};
}

FlushInfo FlushFromJson(const json& from) {
  FlushInfo flush;
  flush.flush_id = from.at("id").get<std::string>();
  flush.rows = ToCount(from.at("rows"));
  flush.columns = ToCount(from.at("columns"));
  flush.window_tokens = ToUnsigned(from.at("tokens"));
  flush.stats = StatsFromJson(from.at("stats"));
  return flush;
}

json ToJson(const StepRecord& step) {
  const StepRequest& request = step.request;
  const StepResult& result = step.result;
  return {{"generation", step.generation},
          {"marks", ToJson(step.marks)},
          {"request",
           {{"learning_rate", request.learning_rate},
            {"gradient_scale", request.gradient_scale},
            {"skip_non_finite", request.non_finite == NonFinite::kSkip},
            {"weight_decay", FromOptional(request.weight_decay, FromDouble)},
            {"momentum", FromOptional(request.momentum, FromDouble)},
            {"beta1", FromOptional(request.beta1, FromDouble)},
            {"beta2", FromOptional(request.beta2, FromDouble)}}},
          {"result",
           {{"generation", result.generation},
            {"weight_version", result.weight_version},
            {"step", result.step},
            {"skipped", result.skipped},
            {"stats", ToJson(result.stats)},
            {"tokens", result.window_tokens}}}};
}

StepRecord StepFromJson(const json& from) {
  StepRecord step;
  step.generation = ToUnsigned(from.at("generation"));
  step.marks = MarksFromJson(from.at("marks"));
  const auto& request = from.at("request");
  step.request.learning_rate = ToDouble(request.at("learning_rate"));
  step.request.gradient_scale = ToDouble(request.at("gradient_scale"));
  if (request.at("skip_non_finite").get<bool>()) step.request.non_finite = NonFinite::kSkip;
  step.request.weight_decay = ToOptional<double>(request.at("weight_decay"), ToDouble);
  step.request.momentum = ToOptional<double>(request.at("momentum"), ToDouble);
  step.request.beta1 = ToOptional<double>(request.at("beta1"), ToDouble);
  step.request.beta2 = ToOptional<double>(request.at("beta2"), ToDouble);
  const auto& result = from.at("result");
  step.result.generation = ToUnsigned(result.at("generation"));
  step.result.weight_version = ToUnsigned(result.at("weight_version"));
  step.result.step = ToCount(result.at("step"));
  step.result.skipped = result.at("skipped").get<bool>();
  step.result.stats = StatsFromJson(result.at("stats"));
  step.result.window_tokens = ToUnsigned(result.at("tokens"));
  return step;
}

json ToJson(const Window& window) {
  json result = {{"generation", window.generation},
                 {"tokens", window.tokens},
                 {"next_tokens", window.next_tokens},
                 {"last_committed_flush", window.committed.flush_id},
                 {"last_committed_generation", window.committed.generation},
                 {"last_aborted_flush", window.aborted.flush_id},
                 {"last_aborted_generation", window.aborted.generation},
                 {"last_step", ToJson(window.last_step)}};
  if (window.state == WindowState::kSealed) {
    result["flush"] = ToJson(window.flush);
    result["flush_marks"] = ToJson(window.marks);
    result["flush_scale"] = window.flush_scale;
  }
  return result;
}

Window WindowFromJson(const json& from) {
  Window window;
  window.generation = ToUnsigned(from.at("generation"));
  window.tokens = static_cast<uint64_t>(ToCount(from.at("tokens")));
  window.next_tokens = static_cast<uint64_t>(ToCount(from.at("next_tokens")));
  window.committed.flush_id = from.at("last_committed_flush").get<std::string>();
  window.committed.generation = ToUnsigned(from.at("last_committed_generation"));
  window.aborted.flush_id = from.at("last_aborted_flush").get<std::string>();
  window.aborted.generation = ToUnsigned(from.at("last_aborted_generation"));
  window.last_step = StepFromJson(from.at("last_step"));
  if (!from.contains("flush")) return window;
  window.state = WindowState::kSealed;
  window.flush = FlushFromJson(from.at("flush"));
  window.marks = MarksFromJson(from.at("flush_marks"));
  window.flush_scale = ToFloat(from.at("flush_scale"));
  return window;
}

json ToJson(const StateTensor& tensor) {
  return {{"name", tensor.name},
          {"dtype", kernels::Name(tensor.type)},
          {"rows", tensor.rows},
          {"columns", tensor.columns}};
}

StateTensor TensorFromJson(const json& from) {
  return {from.at("name").get<std::string>(), ToType(from.at("dtype")), ToCount(from.at("rows")),
          ToCount(from.at("columns"))};
}

// Marks of the past are found again in lanes: those of a session that is still known name lanes that it has,
// and nothing that is yet to come.
void CheckMarks(const HeadCheckpoint& head, const std::vector<SessionMarks>& marks) {
  for (const SessionMarks& named : marks) {
    const auto entry = std::find_if(head.sessions.begin(), head.sessions.end(),
                                    [&](const SessionCheckpoint& one) { return one.id == named.session_id; });
    if (entry == head.sessions.end()) continue;
    const std::vector<AccumulationLedger::Lane>& lanes = entry->session.lanes;
    for (const LaneMarks& mark : named.lanes) {
      const auto index = static_cast<size_t>(mark.lane);
      if (mark.lane < 0 || index >= lanes.size() || mark.accepted > lanes[index].accepted) {
        Refuse(absl::StrCat("marks name lane ", mark.lane, " of session ", named.session_id,
                            ", which does not have it, or not so far"));
      }
    }
  }
}

void CheckWindow(const HeadCheckpoint& head) {
  const Window& window = head.window;
  if (window.generation < 1 || window.last_step.generation >= window.generation) {
    Refuse("the window's generations contradict each other");
  }
  CheckMarks(head, window.last_step.marks);
  CheckMarks(head, window.marks);
}

void CheckSessions(const HeadCheckpoint& head) {
  std::set<std::string> ids;
  std::set<uint64_t> numbers;
  std::set<std::string> open_keys;
  for (const SessionCheckpoint& entry : head.sessions) {
    const Session& session = entry.session;
    const bool is_new = ids.insert(entry.id).second && numbers.insert(session.number).second;
    if (!is_new || session.number == 0 || session.number > head.last_session_number) {
      Refuse("sessions contradict each other");
    }
    if (session.state == SessionState::kOpen && !open_keys.insert(session.client_key).second) {
      Refuse("two open sessions have one client_key");
    }
  }
}

}  // namespace

int64_t ToInteger(const json& value, int64_t least, int64_t most) {
  const bool fits = value.is_number_unsigned()
                        ? value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
                        : value.is_number_integer();
  const int64_t number = fits ? value.get<int64_t>() : 0;
  if (!fits || number < least || number > most) {
    Refuse(absl::StrCat(value.dump(), " is no integer from ", least, " to ", most));
  }
  return number;
}

int64_t ToCount(const json& value) {
  const uint64_t count = ToUnsigned(value);
  if (count > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / 4) Refuse("a number is too large");
  return static_cast<int64_t>(count);
}

json ToJson(const HeadCheckpoint& head) {
  json sessions = json::array();
  for (const SessionCheckpoint& session : head.sessions) sessions.push_back(ToJson(session));
  json tensors = json::array();
  for (const StateTensor& tensor : head.tensors) tensors.push_back(ToJson(tensor));
  return {{"config", ToJson(head.config)},
          {"incarnation", head.incarnation},
          {"saved_at", head.saved_at},
          {"restores", head.restores},
          {"ancestors", ToJson(head.ancestors)},
          {"weight_version", head.weight_version},
          {"optimizer_steps", head.optimizer_steps},
          {"last_committed_write", head.last_committed_write},
          {"last_committed_version", head.last_committed_version},
          {"window", ToJson(head.window)},
          {"last_session_number", head.last_session_number},
          {"sessions", std::move(sessions)},
          {"tensors", std::move(tensors)},
          {"gradients", head.gradients}};
}

HeadCheckpoint HeadFromJson(const json& from) {
  HeadCheckpoint head;
  ReadFields(from.at("config"), kHeadFields, &head.config);
  head.incarnation = from.at("incarnation").get<std::string>();
  head.saved_at = ToCount(from.at("saved_at"));
  // The next ones are larger.
  head.restores = static_cast<uint64_t>(ToCount(from.at("restores")));
  head.ancestors = AncestorsFromJson(from.at("ancestors"));
  head.weight_version = static_cast<uint64_t>(ToCount(from.at("weight_version")));
  head.optimizer_steps = ToCount(from.at("optimizer_steps"));
  head.last_committed_write = from.at("last_committed_write").get<std::string>();
  head.last_committed_version = ToUnsigned(from.at("last_committed_version"));
  head.window = WindowFromJson(from.at("window"));
  head.last_session_number = ToUnsigned(from.at("last_session_number"));
  for (const auto& session : from.at("sessions")) head.sessions.push_back(SessionFromJson(session));
  for (const auto& tensor : from.at("tensors")) head.tensors.push_back(TensorFromJson(tensor));
  head.gradients = from.at("gradients").get<std::vector<std::string>>();
  CheckSessions(head);
  CheckWindow(head);
  return head;
}

}  // namespace lossd::engine
