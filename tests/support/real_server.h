// A whole lossd with one small head on a device of whole numbers, what its clients sent it, what happened to
// that on its way, and what became of it. It sends rows two at a time.
#ifndef LOSSD_TESTS_SUPPORT_REAL_SERVER_H_
#define LOSSD_TESTS_SUPPORT_REAL_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lossd/client.h"
#include "lossd/v1/head.pb.h"
#include "tests/support/call_recorder.h"
#include "tests/support/session_data.h"
#include "tests/support/test_server.h"
#include "tests/support/whole_number_device.h"
#include "tests/unit/rpc/held_port.h"

namespace lossd::testing {

class RealServer {
 public:
  RealServer();

  // Both count when it starts.
  TestServerOptions options;
  HeadConfig config = {
      .name = kHeadName, .vocab_size = kVocab, .hidden_size = kHidden, .weight_type = DataType::kFloat32};

  // Starts it the first time, with weights that are all 0: version 1.
  std::string target();
  // The head is made anew as `config` is by now, as somebody else would.
  void RecreateHead();
  // Another server takes the place of this one, at the same address; it has the same head, or none.
  enum class With { kSameHead, kNoHead };
  void Restart(With with = With::kSameHead);
  // No connection to it lasts, and no new one is taken, until a restart.
  void Stop() { server_.reset(); }
  // Chunks of all sessions that are open which were applied so far; waits for so many.
  uint64_t Applied();
  void AwaitApplied(uint64_t chunks);
  // Somebody else ends the window then.
  void FlushAfter(uint64_t chunks);
  // Somebody else gives up the flush that holds the window.
  void Abort();
  // Somebody else publishes weights that are all 0.
  void Publish(const std::string& head);
  // Somebody else begins a write of weights in the place of the one that is under way.
  void BeginWrite();
  // The write that is under way is gone, as with a server that is started again.
  void ForgetWrite();
  // The lease of all sessions ends.
  void Expire();
  // Another stream takes this lane of the only session, once that has added something.
  void TakeLane(int lane);
  // Done by somebody else when chunk `sequence` is sent for the first time, before it arrives; of any lane,
  // or of this one.
  void Before(uint64_t sequence, std::function<void()> action) { BeforeOf(-1, sequence, std::move(action)); }
  void BeforeOf(int lane, uint64_t sequence, std::function<void()> action);

  CallRecorder::Observed observed() const { return recorder_.observed(); }
  // What the head tells.
  std::vector<float> window();  // dW, of the window that a flush holds if there is one
  uint64_t generation() { return Told().generation(); }
  std::string flush_id() { return Told().flush_id(); }
  v1::WindowState window_state() { return Told().window_state(); }
  std::vector<float> weights();
  std::vector<float> bias();
  void set_weights(const std::vector<float>& weights);

  CallRecorder& recorder() { return recorder_; }
  TestServer& server() { return *server_; }

 private:
  v1::Head Told();
  // One that nothing is recorded of.
  Head Own();
  void CreateHead(engine::Engine& engine);
  std::shared_ptr<engine::Head> EngineHead();
  std::vector<float> ReadWeights(std::vector<float>* bias);

  CallRecorder recorder_;
  const HeldPort port_;
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<Stubs> stubs_;
  std::unique_ptr<Client> client_;
};

}  // namespace lossd::testing

#endif  // LOSSD_TESTS_SUPPORT_REAL_SERVER_H_
