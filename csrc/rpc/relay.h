// A connection to an rpc-server that can be lost without ending this process.
//
// ggml's RPC client aborts the process when a server is gone or answers oddly, in a thread of its own, where nothing
// can catch it. So it is not given the server's address, but that of a relay within this process. The relay passes on
// what the two say. Once the server is lost it answers in its place, in the sizes that the protocol asks for and with
// no meaning: ggml goes on, and whoever evaluates sees is_lost() and throws the result away.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "rpc/socket.h"

namespace pyfly {

class Relay {
  public:
    // Version of the protocol, RPC_PROTO_MAJOR_VERSION and so on of ggml-rpc.h. A server must have the same major
    // number and no higher minor one.
    static constexpr uint8_t major_version = 7, minor_version = 0, patch_version = 0;

    // Memory of a device in bytes, as the server said when it was connected.
    struct Memory {
        uint64_t free, total;
    };

    // Connects and asks for the version and the devices; waits for each answer for at most `timeout_ms`. `name`: for
    // errors. Throws Error(PYFLY_STATUS_SERVER): not there, no such server, of another version, or busy.
    Relay(const std::string & host, const std::string & port, std::string name, int timeout_ms = 5000);

    // Clients that are connected may go on: the connection to the server ends with the last of them.
    ~Relay();
    Relay(const Relay &) = delete;
    Relay & operator=(const Relay &) = delete;

    // Takes clients from now on, two in a row: ggml connects once to count the devices, and once for good. Returns the
    // port on 127.0.0.1. To be called once. Throws Error(PYFLY_STATUS_SERVER).
    uint16_t listen();

    const std::string & name() const { return link_->name; }
    const std::vector<Memory> & devices() const { return devices_; }

    // Whether the server was found to be gone, or to answer oddly. What clients have read before this is false was the
    // server's.
    bool is_lost() const { return link_->is_lost; }

    // The same, and looks whether the server has closed the connection.
    bool is_connected() const { return !is_lost() && link_->server.is_connected(); }

  private:
    // What the thread that relays shares with this object.
    struct Link {
        std::string name;
        Socket server, listener;
        uint8_t version[3] = {};
        std::atomic<bool> is_lost{false}, is_released{false};
    };
    class Client;

    void greet();
    bool ask(uint8_t command, const void * request, size_t n_request, void * answer, size_t n_answer) const;

    std::shared_ptr<Link> link_;
    std::vector<Memory> devices_;
};

} // namespace pyfly
