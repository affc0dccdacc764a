// The relay between ggml's RPC client and an rpc-server, with both played by this test.

#undef NDEBUG
#include <cassert>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "error.h"
#include "rpc/relay.h"

namespace {

using pyfly::Relay;
using pyfly::Socket;

constexpr int timeout_ms = 300;
constexpr uint8_t alloc_buffer = 0, buffer_get_base = 3, free_buffer = 4, set_tensor = 6, set_tensor_hash = 7,
                  get_tensor = 8, graph_compute = 10, get_device_memory = 11, hello = 14, device_count = 15,
                  graph_recompute = 16;

struct Message {
    uint8_t command;
    std::vector<uint8_t> body;
};

bool receive(const Socket & socket, Message & message) {
    uint64_t n = 0;
    if (!socket.receive(&message.command, 1) || !socket.receive(&n, sizeof(n))) {
        return false;
    }
    message.body.resize(n);
    return socket.receive(message.body.data(), n);
}

bool answer(const Socket & socket, const std::vector<uint8_t> & body, uint64_t n_claimed) {
    return socket.send(&n_claimed, sizeof(n_claimed)) && socket.send(body.data(), body.size());
}

bool answer(const Socket & socket, const std::vector<uint8_t> & body) {
    return answer(socket, body, body.size());
}

uint64_t last_number(const std::vector<uint8_t> & body) {
    uint64_t n = 0;
    std::memcpy(&n, body.data() + body.size() - sizeof(n), sizeof(n));
    return n;
}

// A server that takes one client. `serve` does the rest, once the client was greeted with `version`.
class Server {
  public:
    using Serve = std::function<void(const Socket &)>;
    explicit Server(Serve serve, std::vector<uint8_t> version = {7, 0, 0, 0}) {
        listener_ = Socket::listen(port_);
        assert(listener_);
        thread_ = std::thread([this, serve = std::move(serve), version = std::move(version)] {
            const Socket client = listener_.accept(5000);
            Message message;
            if (client && receive(client, message)) {
                assert(message.command == hello && message.body.size() == 24);
                std::vector<uint8_t> greeting = version;
                greeting.resize(28);
                if (answer(client, greeting)) {
                    serve(client);
                }
            }
        });
    }
    ~Server() { thread_.join(); }

    std::string port() const { return std::to_string(port_); }

  private:
    Socket listener_;
    uint16_t port_ = 0;
    std::thread thread_;
};

// Says that it has two devices.
bool tell_devices(const Socket & client) {
    Message message;
    for (int i = 0; i < 3; i++) {
        if (!receive(client, message)) {
            return false;
        }
        if (message.command == device_count) {
            answer(client, {2, 0, 0, 0});
        } else {
            assert(message.command == get_device_memory);
            std::vector<uint8_t> memory(16);
            memory[0] = 10;                                              // free
            memory[8] = static_cast<uint8_t>(20 + message.body.front()); // total
            answer(client, memory);
        }
    }
    return true;
}

// Answers what reads, until the client goes or `n` requests were answered.
void serve(const Socket & client, size_t n) {
    tell_devices(client);
    Message message;
    for (size_t i = 0; i < n && receive(client, message); i++) {
        if (message.command == get_tensor) {
            answer(client, std::vector<uint8_t>(last_number(message.body), 7));
        } else if (message.command == buffer_get_base) {
            answer(client, {1, 2, 3, 4, 5, 6, 7, 8});
        }
    }
}

// ggml's side.
class Client {
  public:
    explicit Client(uint16_t port) {
        std::string why;
        socket_ = Socket::connect("127.0.0.1", std::to_string(port), 5000, why);
        assert(socket_);
        socket_.set_timeout(5000);
    }

    void tell(uint8_t command, const std::vector<uint8_t> & body) const {
        const uint64_t n = body.size();
        assert(socket_.send(&command, 1) && socket_.send(&n, sizeof(n)) && socket_.send(body.data(), n));
    }

    std::vector<uint8_t> ask(uint8_t command, const std::vector<uint8_t> & body) const {
        tell(command, body);
        uint64_t n = 0;
        assert(socket_.receive(&n, sizeof(n)));
        std::vector<uint8_t> out(n);
        assert(socket_.receive(out.data(), n));
        return out;
    }

    std::vector<uint8_t> read(uint64_t n) const { return ask(get_tensor, request(n)); }

    static std::vector<uint8_t> request(uint64_t n) {
        std::vector<uint8_t> body(312);
        std::memcpy(body.data() + body.size() - sizeof(n), &n, sizeof(n));
        return body;
    }

  private:
    Socket socket_;
};

std::string refusal(const std::string & port) {
    try {
        const Relay relay("127.0.0.1", port, "box:1", timeout_ms);
    } catch (const pyfly::Error & error) {
        assert(error.status() == PYFLY_STATUS_SERVER);
        return error.what();
    }
    return {};
}

bool has(const std::string & text, const char * part) {
    if (text.find(part) == std::string::npos) {
        std::fprintf(stderr, "%s\n", text.c_str());
        return false;
    }
    return true;
}

void test_passes_on() {
    size_t n_seen = 0;
    {
        const Server server([&](const Socket & client) {
            tell_devices(client);
            Message message;
            while (receive(client, message)) {
                n_seen += message.command == set_tensor ? message.body.size() : 0;
                if (message.command == get_tensor) {
                    answer(client, std::vector<uint8_t>(last_number(message.body), 7));
                } else if (message.command == device_count) {
                    answer(client, {2, 0, 0, 0});
                }
            }
        });
        Relay relay("127.0.0.1", server.port(), "box:1", timeout_ms);
        assert(relay.devices().size() == 2 && relay.devices()[1].free == 10 && relay.devices()[1].total == 21);
        const uint16_t port = relay.listen();
        assert(Client(port).ask(device_count, {}) == (std::vector<uint8_t>{2, 0, 0, 0}));
        const Client client(port);
        assert(
            client.ask(hello, std::vector<uint8_t>(24, 1)) ==
            (std::vector<uint8_t>{7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
        client.tell(set_tensor, std::vector<uint8_t>(3000000, 1));
        for (const uint64_t n : {0, 1, 5, 262144, 262145, 1000000}) {
            assert(client.read(n) == std::vector<uint8_t>(n, 7));
        }
        assert(!relay.is_lost() && relay.is_connected());
        std::string why;
        const Socket third = Socket::connect("127.0.0.1", std::to_string(port), timeout_ms, why);
        assert(!third); // nobody else gets in
    }
    assert(n_seen == 3000000);
}

void test_stands_in_for_a_lost_server() {
    const Server server([](const Socket & client) { serve(client, 1); });
    Relay relay("127.0.0.1", server.port(), "box:1", timeout_ms);
    const uint16_t port = relay.listen();
    { const Client first(port); }
    const Client client(port);
    assert(client.read(3) == std::vector<uint8_t>(3, 7) && !relay.is_lost());
    assert(client.read(500000) == std::vector<uint8_t>(500000, 0) && relay.is_lost() && !relay.is_connected());
    client.tell(set_tensor, std::vector<uint8_t>(1000000, 1));
    std::vector<uint8_t> allocation(12);
    allocation[4] = 99;
    const std::vector<uint8_t> buffer = client.ask(alloc_buffer, allocation);
    assert(buffer.size() == 16 && buffer[0] != 0 && buffer[8] == 99);
    assert(client.ask(buffer_get_base, std::vector<uint8_t>(8)) != std::vector<uint8_t>(8));
    assert(client.ask(set_tensor_hash, std::vector<uint8_t>(312)) == std::vector<uint8_t>{1});
}

void test_an_answer_that_is_cut_off_or_of_another_size() {
    for (const uint64_t n_claimed : {1000, 999}) {
        const Server server([&](const Socket & client) {
            tell_devices(client);
            Message message;
            receive(client, message);
            answer(client, std::vector<uint8_t>(10, 7), n_claimed);
        });
        Relay relay("127.0.0.1", server.port(), "box:1", timeout_ms);
        const uint16_t port = relay.listen();
        { const Client first(port); }
        assert(Client(port).read(1000) == std::vector<uint8_t>(1000, 0) && relay.is_lost());
    }
}

// As rpc-server does it.
void test_a_graph_that_the_server_has_forgotten() {
    std::vector<Message> seen;
    {
        const Server server([&](const Socket & client) {
            tell_devices(client);
            Message message;
            while (receive(client, message)) {
                if (message.command == get_tensor) {
                    answer(client, {1});
                } else {
                    seen.push_back(message);
                }
            }
        });
        Relay relay("127.0.0.1", server.port(), "box:1", timeout_ms);
        const uint16_t port = relay.listen();
        { const Client first(port); }
        const Client client(port);
        std::vector<uint8_t> one(300000, 7), two(20, 8);
        one[0] = 1;
        two[0] = 0;
        one[1] = one[2] = one[3] = two[1] = two[2] = two[3] = 0;
        client.tell(graph_compute, one);
        client.tell(graph_compute, two);
        client.tell(graph_recompute, {1, 0, 0, 0}); // it has it
        client.tell(free_buffer, std::vector<uint8_t>(8));
        client.tell(graph_recompute, {1, 0, 0, 0});
        client.tell(graph_recompute, {1, 0, 0, 0}); // it has it again
        client.tell(graph_recompute, {0, 0, 0, 0});
        assert(client.read(1) == std::vector<uint8_t>{1} && !relay.is_lost());
        const std::vector<Message> expected = {
            {graph_compute, one},
            {graph_compute, two},
            {graph_recompute, {1, 0, 0, 0}},
            {free_buffer, std::vector<uint8_t>(8)},
            {graph_compute, one},
            {graph_recompute, {1, 0, 0, 0}},
            {graph_compute, two},
        };
        assert(seen.size() == expected.size());
        for (size_t i = 0; i < seen.size(); i++) {
            assert(seen[i].command == expected[i].command && seen[i].body == expected[i].body);
        }
    }
}

void test_the_connection_outlives_the_relay_as_long_as_the_client() {
    const Server server([](const Socket & client) { serve(client, 100); });
    auto relay = std::make_unique<Relay>("127.0.0.1", server.port(), "box:1", timeout_ms);
    const uint16_t port = relay->listen();
    { const Client first(port); }
    const Client client(port);
    assert(client.read(3) == std::vector<uint8_t>(3, 7));
    relay.reset();
    assert(client.read(4) == std::vector<uint8_t>(4, 7));
}

void test_without_clients_the_connection_ends_with_the_relay() {
    const Server server([](const Socket & client) { serve(client, 100); });
    Relay relay("127.0.0.1", server.port(), "box:1", timeout_ms);
    relay.listen();
}

void test_refusals() {
    const auto nothing = [](const Socket &) {};
    uint16_t port = 0;
    { const Socket closed = Socket::listen(port); }
    assert(has(refusal(std::to_string(port)), "the RPC server box:1 is not there ("));
    for (const std::vector<uint8_t> & version : {std::vector<uint8_t>{3, 6, 1}, std::vector<uint8_t>{7, 1, 0}}) {
        const Server server(nothing, version);
        assert(has(refusal(server.port()), "of llama.cpp's RPC protocol, and this llama-cpp-python version 7.0.0"));
    }
    {
        const Server server(nothing);
        assert(has(refusal(server.port()), "does not say which devices it has"));
    }
    const Socket silent = Socket::listen(port);
    assert(has(refusal(std::to_string(port)), "serves one program at a time"));
    std::thread other([&] {
        silent.accept(5000); // the one before
        const Socket client = silent.accept(5000);
        const char text[] = "HTTP/1.1 400 Bad Request\r\n\r\n";
        client.send(text, sizeof(text));
        Message message;
        receive(client, message);
    });
    assert(has(refusal(std::to_string(port)), "does not answer as an rpc-server of llama.cpp does"));
    other.join();
}

} // namespace

int main() {
    test_passes_on();
    test_stands_in_for_a_lost_server();
    test_an_answer_that_is_cut_off_or_of_another_size();
    test_a_graph_that_the_server_has_forgotten();
    test_the_connection_outlives_the_relay_as_long_as_the_client();
    test_without_clients_the_connection_ends_with_the_relay();
    test_refusals();
    std::puts("relay: ok");
    return 0;
}
