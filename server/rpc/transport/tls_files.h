// The files of TLS for the gRPC port.
#ifndef LOSSD_SERVER_RPC_TRANSPORT_TLS_FILES_H_
#define LOSSD_SERVER_RPC_TRANSPORT_TLS_FILES_H_

#include <string>

namespace lossd::rpc {

// Paths of PEM files. Without a certificate there is no TLS.
struct TlsFiles {
  std::string certificate;  // the server's, with intermediate ones behind it
  std::string key;
  // Authorities whose clients are let in; empty: every client is, and none is asked for a certificate.
  std::string client_ca;

  bool enabled() const { return !certificate.empty(); }
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TRANSPORT_TLS_FILES_H_
