// The inside of lossd::Head.
#ifndef LOSSD_CLIENT_SRC_COMMON_HEAD_IMPL_H_
#define LOSSD_CLIENT_SRC_COMMON_HEAD_IMPL_H_

#include <memory>

#include "client/src/common/head_context.h"
#include "lossd/client.h"

namespace lossd {

class Head::Impl {
 public:
  explicit Impl(std::shared_ptr<internal::HeadContext> shared) : context(std::move(shared)) {}
  const std::shared_ptr<internal::HeadContext> context;
};

}  // namespace lossd

#endif  // LOSSD_CLIENT_SRC_COMMON_HEAD_IMPL_H_
