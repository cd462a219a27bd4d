// What ranks meet for, and how long one of them waits there for the others: who waits least is the one that
// all others wait for.
#ifndef LOSSD_KERNELS_EXCHANGE_H_
#define LOSSD_KERNELS_EXCHANGE_H_

#include <array>
#include <chrono>
#include <cstddef>

namespace lossd::kernels {

enum class Exchange {
  kHiddenStates,    // to every rank
  kRowStatistics,   // sums over the vocabulary, and what they are made of
  kInputGradients,  // parts of dX, to the rank that answers
  kRows,            // of weights, gradients, state and logits, and the statistics of gradients
};
inline constexpr std::array kExchanges = {Exchange::kHiddenStates, Exchange::kRowStatistics,
                                          Exchange::kInputGradients, Exchange::kRows};

constexpr const char* Name(Exchange exchange) {
  switch (exchange) {
    case Exchange::kHiddenStates:
      return "hidden_states";
    case Exchange::kRowStatistics:
      return "row_statistics";
    case Exchange::kInputGradients:
      return "input_gradients";
    case Exchange::kRows:
      return "rows";
  }
  return "";
}

// Is told of a rank's exchanges. Must not wait.
class ExchangeObserver {
 public:
  virtual ~ExchangeObserver() = default;
  // The calling thread waits from now on. Not called where the device waits, and no thread with it.
  virtual void OnWaiting(Exchange exchange) = 0;
  // One is over, for which the rank has waited so long, moving the bytes included. By the thread that waited,
  // or by whoever learns it of the device.
  virtual void OnWaited(Exchange exchange, double seconds) = 0;
};

// The calling thread waits as long as this lives. `observer` may be null.
class ExchangeWait {
 public:
  ExchangeWait(ExchangeObserver* observer, Exchange exchange) : observer_(observer), exchange_(exchange) {
    if (observer_ == nullptr) return;
    observer_->OnWaiting(exchange_);
    began_ = std::chrono::steady_clock::now();
  }
  ~ExchangeWait() {
    if (observer_ == nullptr) return;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began_;
    observer_->OnWaited(exchange_, waited.count());
  }
  ExchangeWait(const ExchangeWait&) = delete;
  ExchangeWait& operator=(const ExchangeWait&) = delete;

 private:
  ExchangeObserver* const observer_;
  const Exchange exchange_;
  std::chrono::steady_clock::time_point began_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_EXCHANGE_H_
