// A gRPC server that serves what is registered with it and nothing else.
#ifndef LOSSD_SERVER_RPC_NO_PLUGINS_H_
#define LOSSD_SERVER_RPC_NO_PLUGINS_H_

#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>

#include <memory>
#include <vector>

namespace lossd::rpc {

// Keeps reflection away, which otherwise comes to every server of the process.
class NoPlugins final : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments* /*arguments*/) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->clear();
  }
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_NO_PLUGINS_H_
