// The devices of other machines, as llama.cpp's RPC backend has them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"
#include "rpc/relay.h"

namespace pyfly {

// A connection to an rpc-server. An rpc-server serves one connection at a time, so that all models of this process
// share it; it ends when the last of them and the last pointer to it are gone.
class RpcServer {
  public:
    // The connection to this server, `name` in errors: the one there is, unless it was lost. wants_devices: llama.cpp
    // is to use it. Throws Error: SERVER as Relay does, INVALID where llama.cpp was built without RPC and is to use it.
    static std::shared_ptr<RpcServer> connect(const std::string & host, const std::string & port,
                                              const std::string & name, bool wants_devices);

    // Those that a model has devices of.
    static std::vector<std::shared_ptr<RpcServer>> of(const llama_model * model);

    ~RpcServer();
    RpcServer(const RpcServer &) = delete;
    RpcServer & operator=(const RpcServer &) = delete;

    const Relay & relay() const { return relay_; }

    // Its devices for llama_model_params.devices, where they were wanted. They are not among those that llama.cpp
    // chooses from by itself.
    const std::vector<ggml_backend_dev_t> & devices() const { return devices_; }

    // Throws Error(PYFLY_STATUS_SERVER) if the server is lost: all that was computed with it since is void.
    void require_alive() const;

  private:
    RpcServer(const std::string & host, const std::string & port, const std::string & name)
        : relay_(host, port, name) {}

    void open_devices();

    Relay relay_;
    std::vector<ggml_backend_dev_t> devices_;
    ggml_backend_t keeper_ = nullptr; // ggml's client keeps its connection as long as something uses it
};

} // namespace pyfly
