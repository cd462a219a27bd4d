// The two packets of the socket for regions: the first byte says whether it is a client's, which names a
// region, or the server's answer.
#include <google/protobuf/stubs/logging.h>

#include <string>

#include "client/src/regions/region_attachment.h"
#include "server/engine/common/region_handle.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

void CheckHandle(std::string_view packet) {
  const auto handle = engine::RegionHandle::Parse({packet.data(), packet.size()}, "handle");
  Expect(handle.ok() == (packet.size() == engine::RegionHandle::kBytes), "a handle has its size");
  if (!handle.ok()) return;
  Expect(handle->bytes() == packet, "a handle is its bytes");
  const auto again = engine::RegionHandle::Parse(handle->bytes(), "handle");
  Expect(again.ok() && *again == *handle, "what is written is read again");
  Expect(engine::RegionHandle::Hash{7}(*again) == engine::RegionHandle::Hash{7}(*handle),
         "equal handles share a bucket");
}

void CheckAttachment(std::string_view packet) {
  const auto attachment = internal::ParseRegionAttachment(packet);
  if (!attachment.ok()) return;
  Expect(attachment->bytes() > 0 && attachment->bytes() <= internal::kMostRegionBytes,
         "memory has a size that there can be");
  const auto again = internal::ParseRegionAttachment(attachment->SerializeAsString());
  Expect(again.ok() && again->SerializeAsString() == attachment->SerializeAsString(),
         "what is written is read again");
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const google::protobuf::LogSilencer kSilent;  // it reports every string that is no UTF-8
  if (size == 0) return 0;
  const std::string_view packet = lossd::fuzz::TextOf(data + 1, size - 1);
  if ((data[0] & 1) == 0) {
    lossd::fuzz::CheckHandle(packet);
  } else {
    lossd::fuzz::CheckAttachment(packet);
  }
  return 0;
}
