// A TCP socket. Nothing here throws: what fails says so, and a socket that failed is of no more use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace pyfly {

class Socket {
  public:
    Socket() = default; // none
    ~Socket() { close(); }
    Socket(Socket && other) noexcept : handle_(std::exchange(other.handle_, none)) {}
    Socket & operator=(Socket && other) noexcept;

    // Connects within `timeout_ms` for each address of the host; without success none is returned and `why` says so.
    static Socket connect(const std::string & host, const std::string & port, int timeout_ms, std::string & why);

    // Listens on a free port of 127.0.0.1, which `port` receives; none where that fails.
    static Socket listen(uint16_t & port);

    // The next client of a listening socket; none after `timeout_ms`.
    Socket accept(int timeout_ms) const;

    explicit operator bool() const { return handle_ != none; }

    // All n bytes, or false.
    bool send(const void * data, size_t n) const;
    bool receive(void * data, size_t n) const;

    // Limits how long a send or a receive may wait; 0: no limit.
    void set_timeout(int milliseconds) const;

    // Has the system find out within a minute where the other machine, or the way to it, is gone.
    void watch_peer() const;

    // Has the connection end with a reset, also where this process is killed: whoever sends to a connection that ended
    // in the normal way gets a signal (SIGPIPE) that ends programs which do not expect it, such as rpc-server.
    void reset_on_close() const;

    // Whether the other side has not closed the connection, as far as is known here. Reads nothing.
    bool is_connected() const;

    // Ends the connection; another thread's send or receive returns false.
    void shut_down() const;
    void close();

  private:
#ifdef _WIN32
    using Handle = uintptr_t;
    static constexpr Handle none = ~Handle{0};
#else
    using Handle = int;
    static constexpr Handle none = -1;
#endif
    explicit Socket(Handle handle) : handle_(handle) {}

    Handle handle_ = none;
};

} // namespace pyfly
