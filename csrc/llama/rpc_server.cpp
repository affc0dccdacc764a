#include "rpc_server.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "abort_guard.h"
#include "error.h"
#include "ggml-rpc.h"
#include "llama_ext.h"

namespace pyfly {

static_assert(RPC_PROTO_MAJOR_VERSION == Relay::major_version && RPC_PROTO_MINOR_VERSION == Relay::minor_version &&
                  RPC_PROTO_PATCH_VERSION == Relay::patch_version,
              "llama.cpp's RPC protocol has changed: see whether the relay still knows its commands");

namespace {

std::mutex mutex;

// All that may be alive.
std::vector<std::weak_ptr<RpcServer>> & servers() {
    static auto * all = new std::vector<std::weak_ptr<RpcServer>>; // models may outlive the end of the program
    return *all;
}

// ggml_backend_rpc_add_server; null in builds without RPC, which most are: so it is looked up, not linked.
decltype(&ggml_backend_rpc_add_server) add_server() {
    ggml_backend_reg_t registry = ggml_backend_reg_by_name("RPC");
    return registry == nullptr ? nullptr
                               : reinterpret_cast<decltype(&ggml_backend_rpc_add_server)>(
                                     ggml_backend_reg_get_proc_address(registry, "ggml_backend_rpc_add_server"));
}

} // namespace

std::shared_ptr<RpcServer> RpcServer::connect(const std::string & host, const std::string & port,
                                              const std::string & name, bool wants_devices) {
    if (wants_devices && add_server() == nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "this llama-cpp-python was built without RPC; to use " + name +
                                              " build it with CMAKE_ARGS=\"-DGGML_RPC=on\"");
    }
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<std::weak_ptr<RpcServer>> & all = servers();
    all.erase(std::remove_if(all.begin(), all.end(), [](const auto & one) { return one.expired(); }), all.end());
    std::shared_ptr<RpcServer> server;
    for (const std::weak_ptr<RpcServer> & one : all) {
        std::shared_ptr<RpcServer> open = one.lock();
        if (open && open->relay_.name() == name && open->relay_.is_connected()) {
            server = std::move(open);
        }
    }
    if (!server) {
        server.reset(new RpcServer(host, port, name));
        all.push_back(server);
    }
    if (wants_devices && server->devices_.empty()) {
        server->open_devices();
    }
    return server;
}

std::vector<std::shared_ptr<RpcServer>> RpcServer::of(const llama_model * model) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<std::shared_ptr<RpcServer>> found;
    for (const std::weak_ptr<RpcServer> & one : servers()) {
        const std::shared_ptr<RpcServer> server = one.lock();
        for (int32_t i = 0; server && i < llama_model_n_devices(model); i++) {
            const std::vector<ggml_backend_dev_t> & own = server->devices_;
            if (std::find(own.begin(), own.end(), llama_model_get_device(model, i)) != own.end()) {
                found.push_back(server);
                break;
            }
        }
    }
    return found;
}

RpcServer::~RpcServer() {
    if (keeper_ != nullptr) {
        ggml_backend_free(keeper_);
    }
}

void RpcServer::open_devices() {
    const std::string endpoint = "127.0.0.1:" + std::to_string(relay_.listen());
    std::vector<ggml_backend_dev_t> found;
    try {
        const AbortGuard guard;
        ggml_backend_reg_t registry = add_server()(endpoint.c_str());
        for (size_t i = 0; registry != nullptr && i < ggml_backend_reg_dev_count(registry); i++) {
            found.push_back(ggml_backend_reg_dev_get(registry, i));
        }
        if (!found.empty()) {
            keeper_ = ggml_backend_dev_init(found.front(), nullptr);
        }
    } catch (const std::runtime_error & error) {
        throw Error(PYFLY_STATUS_SERVER,
                    "ggml could not connect to the RPC server " + relay_.name() + ": " + error.what());
    }
    require_alive();
    if (keeper_ == nullptr || found.size() != relay_.devices().size()) {
        throw Error(PYFLY_STATUS_SERVER, "the RPC server " + relay_.name() + " has lost a device; start it again");
    }
    devices_ = std::move(found);
}

void RpcServer::require_alive() const {
    if (relay_.is_lost()) {
        throw Error(PYFLY_STATUS_SERVER, "the RPC server " + relay_.name() +
                                             " was lost: it ended, or cannot be reached any more; start it again and "
                                             "load the model anew");
    }
}

} // namespace pyfly
