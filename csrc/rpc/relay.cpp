#include "rpc/relay.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <thread>

#include "error.h"

namespace pyfly {

namespace {

// Commands of the protocol. A request is the command, the size of what follows (8 bytes) and that; an answer, where
// there is one, is its size (8 bytes) and that. Numbers are little-endian, as ggml has them.
enum Command : uint8_t {
    alloc_buffer = 0,
    get_alignment = 1,
    get_max_size = 2,
    buffer_get_base = 3,
    free_buffer = 4,
    set_tensor_hash = 7,
    get_tensor = 8,
    copy_tensor = 9,
    graph_compute = 10,
    get_device_memory = 11,
    get_alloc_size = 13,
    hello = 14,
    device_count = 15,
    graph_recompute = 16,
};

constexpr size_t n_header = 1 + sizeof(uint64_t); // command and size
constexpr size_t n_caps = 24;                     // what a side can do besides TCP
constexpr size_t n_hello = 4 + n_caps;            // version, padding, caps
constexpr size_t n_chunk = size_t{1} << 18;
constexpr uint32_t most_devices = 64;
constexpr int patience_ms = 200; // between looks whether anybody still wants to connect

uint64_t number_at(const uint8_t * from) {
    uint64_t n;
    std::memcpy(&n, from, sizeof(n));
    return n;
}

void put_number(uint8_t * to, uint64_t n) {
    std::memcpy(to, &n, sizeof(n));
}

// Bytes of the answer to a request, of which `request` holds the first n; nothing where none follows.
std::optional<uint64_t> answer_size(uint8_t command, const uint8_t * request, size_t n) {
    switch (command) {
        case alloc_buffer:
        case get_device_memory:
            return 16;
        case get_alignment:
        case get_max_size:
        case buffer_get_base:
        case get_alloc_size:
            return 8;
        case set_tensor_hash:
        case copy_tensor:
            return 1;
        case device_count:
            return 4;
        case get_tensor: // a tensor, an offset and a size
            return n >= sizeof(uint64_t) ? number_at(request + n - sizeof(uint64_t)) : 0;
        default:
            return std::nullopt;
    }
}

// What a lost server answers, n bytes: whatever ggml asks for it gets, so that it goes on.
std::vector<uint8_t> substitute(uint8_t command, const uint8_t * request, size_t n_request, uint64_t n) {
    std::vector<uint8_t> answer(static_cast<size_t>(n), 0);
    switch (command) {
        case alloc_buffer: // a buffer of the size that was asked for
            put_number(answer.data(), 1);
            put_number(answer.data() + 8, n_request >= 8 ? number_at(request + n_request - 8) : 0);
            break;
        case get_alignment:
            put_number(answer.data(), 128);
            break;
        case get_max_size:
            put_number(answer.data(), UINT64_MAX / 2);
            break;
        case buffer_get_base:
            put_number(answer.data(), 4096);
            break;
        case set_tensor_hash: // "it has the data": nothing is sent
        case copy_tensor:
            answer[0] = 1;
            break;
        default:
            break;
    }
    return answer;
}

std::string written(uint8_t major, uint8_t minor, uint8_t patch) {
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

} // namespace

// ---- Connecting -----------------------------------------------------------------------------------------------------

Relay::Relay(const std::string & host, const std::string & port, std::string name, int timeout_ms)
    : link_(std::make_shared<Link>()) {
    link_->name = std::move(name);
    std::string why;
    link_->server = Socket::connect(host, port, timeout_ms, why);
    if (!link_->server) {
        throw Error(PYFLY_STATUS_SERVER, "the RPC server " + link_->name + " is not there (" + why +
                                             "); start rpc-server on that machine, and check address and port");
    }
    link_->server.reset_on_close();
    link_->server.set_timeout(timeout_ms);
    greet();
    link_->server.set_timeout(0);
    link_->server.watch_peer();
}

bool Relay::ask(uint8_t command, const void * request, size_t n_request, void * answer, size_t n_answer) const {
    std::vector<uint8_t> message(n_header + n_request);
    message[0] = command;
    put_number(message.data() + 1, n_request);
    if (n_request > 0) {
        std::memcpy(message.data() + n_header, request, n_request);
    }
    uint64_t n = 0;
    return link_->server.send(message.data(), message.size()) && link_->server.receive(&n, sizeof(n)) &&
           n == n_answer && link_->server.receive(answer, n_answer);
}

void Relay::greet() {
    const auto refuse = [&](const std::string & why) { throw Error(PYFLY_STATUS_SERVER, why); };
    const uint8_t caps[n_caps] = {}; // TCP alone
    std::vector<uint8_t> message(n_header, hello);
    put_number(message.data() + 1, n_caps);
    message.insert(message.end(), caps, caps + n_caps);
    uint64_t n = 0;
    const bool is_sent = link_->server.send(message.data(), message.size());
    if (!is_sent || !link_->server.receive(&n, sizeof(n))) {
        if (is_sent && link_->server.is_connected()) {
            refuse("the RPC server " + link_->name +
                   " takes the connection and does not answer; rpc-server serves one program at a time, so end the "
                   "other one or start another rpc-server");
        }
        refuse("what listens at " + link_->name +
               " closed the connection when it was asked for its version; it is not an rpc-server, or one of another "
               "release of llama.cpp");
    }
    uint8_t answer[n_hello] = {};
    if (n < 3 || n > sizeof(answer) || !link_->server.receive(answer, static_cast<size_t>(n))) {
        refuse("what listens at " + link_->name +
               " does not answer as an rpc-server of llama.cpp does; check address and port");
    }
    std::copy_n(answer, 3, link_->version);
    if (answer[0] != major_version || answer[1] > minor_version) {
        refuse("the RPC server " + link_->name + " speaks version " + written(answer[0], answer[1], answer[2]) +
               " of llama.cpp's RPC protocol, and this llama-cpp-python version " +
               written(major_version, minor_version, patch_version) + "; build both from the same llama.cpp");
    }
    uint32_t n_devices = 0;
    bool is_understood = ask(device_count, nullptr, 0, &n_devices, sizeof(n_devices)) && n_devices <= most_devices;
    for (uint32_t device = 0; device < n_devices && is_understood; device++) {
        uint8_t memory[16];
        is_understood = ask(get_device_memory, &device, sizeof(device), memory, sizeof(memory));
        devices_.push_back({number_at(memory), number_at(memory + 8)});
    }
    if (!is_understood || devices_.empty()) {
        refuse("the RPC server " + link_->name + " does not say which devices it has; start it again");
    }
}

// ---- Relaying -------------------------------------------------------------------------------------------------------

// A client that is connected.
class Relay::Client {
  public:
    Client(Link & link, Socket socket) : link_(link), socket_(std::move(socket)), chunk_(n_header + n_chunk) {}

    // Relays until the client goes.
    void serve() {
        while (socket_.receive(chunk_.data(), n_header) && relay(chunk_[0], number_at(chunk_.data() + 1))) {
        }
    }

  private:
    // One request and its answer, where there is one. False: the client is gone.
    bool relay(uint8_t command, uint64_t n_request) {
        const size_t n_first = static_cast<size_t>(std::min<uint64_t>(n_request, n_chunk));
        if (!socket_.receive(chunk_.data() + n_header, n_first)) {
            return false;
        }
        if (command == hello) { // the server was greeted already
            uint8_t answer[n_hello] = {};
            std::copy_n(link_.version, 3, answer);
            return send_answer(answer, sizeof(answer));
        }
        const auto n_answer = answer_size(command, chunk_.data() + n_header, n_first);
        if (command == graph_recompute && resend_graph(n_first)) {
            return true;
        }
        std::vector<uint8_t> * const copy = note(command, n_first);
        std::vector<uint8_t> instead;
        if (n_answer && command != get_tensor) { // zeros
            instead = substitute(command, chunk_.data() + n_header, n_first, *n_answer);
        }
        to_server(chunk_.data(), n_header + n_first);
        for (uint64_t n_left = n_request - n_first; n_left > 0;) {
            const size_t n = static_cast<size_t>(std::min<uint64_t>(n_left, n_chunk));
            if (!socket_.receive(chunk_.data(), n)) {
                return false;
            }
            if (copy != nullptr) {
                copy->insert(copy->end(), chunk_.begin(), chunk_.begin() + static_cast<std::ptrdiff_t>(n));
            }
            to_server(chunk_.data(), n);
            n_left -= n;
        }
        return !n_answer || answer(*n_answer, instead);
    }

    // A server that frees a buffer, of any model, forgets its graphs (0.3.36), and takes it for a fault when it is told
    // to compute the last one again. So that is kept here, and sent again.
    struct Graph {
        std::vector<uint8_t> request;
        bool is_forgotten = false;
    };

    uint32_t device_in(size_t n) const {
        uint32_t device = 0;
        std::memcpy(&device, chunk_.data() + n_header, std::min(n, sizeof(device)));
        return device;
    }

    // Notes a request, of which the chunk holds the header and n bytes; where the rest is wanted, returns what it is to
    // be appended to.
    std::vector<uint8_t> * note(uint8_t command, size_t n) {
        if (command == free_buffer) {
            for (auto & [device, graph] : graphs_) {
                graph.is_forgotten = true;
            }
        }
        if (command != graph_compute) {
            return nullptr;
        }
        Graph & graph = graphs_[device_in(n)];
        graph.is_forgotten = false;
        graph.request.assign(chunk_.begin(), chunk_.begin() + static_cast<std::ptrdiff_t>(n_header + n));
        return &graph.request;
    }

    bool resend_graph(size_t n) {
        const auto found = graphs_.find(device_in(n));
        if (found == graphs_.end() || !found->second.is_forgotten) {
            return false;
        }
        found->second.is_forgotten = false;
        to_server(found->second.request.data(), found->second.request.size());
        return true;
    }

    void to_server(const uint8_t * data, size_t n) {
        if (!link_.is_lost && !link_.server.send(data, n)) {
            lose();
        }
    }

    // Passes on the server's answer of n bytes, or what of it does not come: `instead`, of as many bytes or empty.
    bool answer(uint64_t n, const std::vector<uint8_t> & instead) {
        uint64_t n_given = 0;
        if (!link_.is_lost && (!link_.server.receive(&n_given, sizeof(n_given)) || n_given != n)) {
            lose();
        }
        put_number(chunk_.data(), n);
        size_t n_before = sizeof(n); // in the chunk
        for (uint64_t done = 0; n_before > 0 || done < n; n_before = 0) {
            const size_t n_now = static_cast<size_t>(std::min<uint64_t>(n - done, n_chunk));
            uint8_t * const to = chunk_.data() + n_before;
            if (!link_.is_lost && !link_.server.receive(to, n_now)) {
                lose();
            }
            if (link_.is_lost) {
                std::memset(to, 0, n_now);
                if (!instead.empty()) {
                    std::copy_n(instead.data() + done, n_now, to);
                }
            }
            if (!socket_.send(chunk_.data(), n_before + n_now)) {
                return false;
            }
            done += n_now;
        }
        return true;
    }

    bool send_answer(const uint8_t * data, size_t n) {
        std::vector<uint8_t> message(sizeof(uint64_t) + n);
        put_number(message.data(), n);
        std::copy_n(data, n, message.data() + sizeof(uint64_t));
        return socket_.send(message.data(), message.size());
    }

    void lose() {
        link_.is_lost = true;
        link_.server.shut_down();
    }

    Link & link_;
    Socket socket_;
    std::vector<uint8_t> chunk_;       // room for a header and n_chunk bytes
    std::map<uint32_t, Graph> graphs_; // the last one of each device
};

uint16_t Relay::listen() {
    uint16_t port = 0;
    link_->listener = Socket::listen(port);
    if (!link_->listener) {
        throw Error(PYFLY_STATUS_SERVER, "no port of 127.0.0.1 is free to talk to the RPC server " + link_->name +
                                             " through; close some connections");
    }
    std::thread([link = link_] {
        for (int n_left = 2; n_left > 0 && !link->is_released;) {
            if (Socket client = link->listener.accept(patience_ms)) {
                if (--n_left == 0) {
                    link->listener.close(); // nobody else gets in
                }
                Client(*link, std::move(client)).serve();
            }
        }
        link->is_lost = true; // for whoever still holds it: nobody relays any more
    }).detach();
    return port;
}

Relay::~Relay() {
    link_->is_released = true;
}

} // namespace pyfly
