// How calls between ranks fail: with a code and a sentence, and without exceptions.
#ifndef LOSSD_KERNELS_COLLECTIVES_RESULT_H_
#define LOSSD_KERNELS_COLLECTIVES_RESULT_H_

#include <string>
#include <utility>

namespace lossd::kernels::collectives {

enum class Code {
  kOk,
  kInvalidArgument,  // nothing was sent; the communicator is as it was
  kUnavailable,      // a library or a network interface is missing or too old
  kTimeout,          // a rank did not come in time
  kPeerLost,         // a rank died, aborted or closed its connection
  kMismatch,         // ranks call different operations, or disagree about sizes
  kAborted,          // Abort() was called here
  kDeviceFailed,     // the device of this rank: nothing will work there any more
  kFailed,           // anything else
};

class [[nodiscard]] Result {
 public:
  Result() = default;
  Result(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  // For people: the operation, the rank, and the cause.
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

}  // namespace lossd::kernels::collectives

// Returns from the calling function, whose type is Result, if `expression` fails.
#define LOSSD_COLLECTIVE_TRY(expression)                                                       \
  do {                                                                                         \
    if (::lossd::kernels::collectives::Result lossd_result = (expression); !lossd_result.ok()) \
      return lossd_result;                                                                     \
  } while (false)

#endif  // LOSSD_KERNELS_COLLECTIVES_RESULT_H_
