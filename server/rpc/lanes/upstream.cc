#include "server/rpc/lanes/upstream.h"

namespace lossd::rpc {

Upstream::Upstream(Events* events, const LeaderCalls& leader,
                   const std::multimap<std::string, std::string>& metadata)
    : events_(events), stub_(leader.channel) {
  leader.identify(&context_);
  for (const auto& [name, value] : metadata) context_.AddMetadata(name, value);
  stub_.PrepareBidiStreamingCall(&context_, "/lossd.group.v1.RelayService/Relay", {}, this);
  AddHold();  // operations are started by the client's reactions
}

}  // namespace lossd::rpc
