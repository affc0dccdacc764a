#include "rpc/socket.h"

#ifdef _WIN32
#include <winsock2.h>
#include <ws2tcpip.h>
#else
#include <arpa/inet.h>
#include <cerrno>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <memory>
#include <system_error>

namespace pyfly {

namespace {

constexpr size_t most_at_once = size_t{1} << 30;

#ifdef _WIN32
bool start() {
    static const bool has_started = [] {
        WSADATA data;
        return WSAStartup(MAKEWORD(2, 2), &data) == 0;
    }();
    return has_started;
}
int last_error() {
    return WSAGetLastError();
}
constexpr int in_progress = WSAEWOULDBLOCK, interrupted = WSAEINTR, no_data = WSAEWOULDBLOCK;
constexpr int no_signal = 0, no_wait = 0;
template <typename Handle> void set_blocking(Handle handle, bool is_blocking) {
    u_long is_not = is_blocking ? 0 : 1;
    ioctlsocket(handle, FIONBIO, &is_not);
}
int wait_for(WSAPOLLFD & one, int timeout_ms) {
    return WSAPoll(&one, 1, timeout_ms);
}
using Poll = WSAPOLLFD;
using Size = int;
#else
bool start() {
    return true;
}
int last_error() {
    return errno;
}
constexpr int in_progress = EINPROGRESS, interrupted = EINTR, no_data = EAGAIN, no_wait = MSG_DONTWAIT;
#ifdef MSG_NOSIGNAL
constexpr int no_signal = MSG_NOSIGNAL;
#else
constexpr int no_signal = 0;
#endif
void set_blocking(int handle, bool is_blocking) {
    const int flags = fcntl(handle, F_GETFL, 0);
    fcntl(handle, F_SETFL, is_blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}
using Poll = pollfd;
int wait_for(Poll & one, int timeout_ms) {
    return poll(&one, 1, timeout_ms);
}
using Size = size_t;
#endif

template <typename Handle, typename Value> void set_option(Handle handle, int level, int name, Value value) {
    setsockopt(handle, level, name, reinterpret_cast<const char *>(&value), sizeof(value));
}

// Messages are small and answered one by one: nothing must wait for more to send.
template <typename Handle> void prepare(Handle handle) {
    set_option(handle, IPPROTO_TCP, TCP_NODELAY, 1);
#ifdef SO_NOSIGPIPE
    set_option(handle, SOL_SOCKET, SO_NOSIGPIPE, 1);
#endif
#ifndef _WIN32
    fcntl(handle, F_SETFD, FD_CLOEXEC);
#endif
}

std::string words(int error) {
    return std::system_category().message(error);
}

} // namespace

Socket & Socket::operator=(Socket && other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
}

void Socket::close() {
    if (handle_ != none) {
#ifdef _WIN32
        closesocket(handle_);
#else
        ::close(handle_);
#endif
        handle_ = none;
    }
}

Socket Socket::connect(const std::string & host, const std::string & port, int timeout_ms, std::string & why) {
    addrinfo wanted = {};
    wanted.ai_family = AF_UNSPEC;
    wanted.ai_socktype = SOCK_STREAM;
    addrinfo * found = nullptr;
    const int failed = start() ? getaddrinfo(host.c_str(), port.c_str(), &wanted, &found) : EAI_FAIL;
    if (failed != 0) {
        why = gai_strerror(failed);
        return {};
    }
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
    for (const addrinfo * one = found; one != nullptr; one = one->ai_next) {
        Socket socket(::socket(one->ai_family, one->ai_socktype, one->ai_protocol));
        if (!socket) {
            why = words(last_error());
            continue;
        }
        prepare(socket.handle_);
        set_blocking(socket.handle_, false);
        int error =
            ::connect(socket.handle_, one->ai_addr, static_cast<socklen_t>(one->ai_addrlen)) == 0 ? 0 : last_error();
        if (error == in_progress) {
            Poll poll = {};
            poll.fd = socket.handle_;
            poll.events = POLLOUT;
            if (wait_for(poll, timeout_ms) <= 0) {
                why = "no answer within " + std::to_string(timeout_ms / 1000) + " s";
                continue;
            }
            socklen_t size = sizeof(error);
            getsockopt(socket.handle_, SOL_SOCKET, SO_ERROR, reinterpret_cast<char *>(&error), &size);
        }
        if (error == 0) {
            set_blocking(socket.handle_, true);
            return socket;
        }
        why = words(error);
    }
    return {};
}

Socket Socket::listen(uint16_t & port) {
    Socket socket(start() ? ::socket(AF_INET, SOCK_STREAM, 0) : none);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    if (!socket || ::bind(socket.handle_, reinterpret_cast<sockaddr *>(&address), size) != 0 ||
        ::listen(socket.handle_, 2) != 0 ||
        getsockname(socket.handle_, reinterpret_cast<sockaddr *>(&address), &size) != 0) {
        return {};
    }
    prepare(socket.handle_);
    port = ntohs(address.sin_port);
    return socket;
}

Socket Socket::accept(int timeout_ms) const {
    Poll poll = {};
    poll.fd = handle_;
    poll.events = POLLIN;
    if (wait_for(poll, timeout_ms) <= 0) {
        return {};
    }
    Socket client(::accept(handle_, nullptr, nullptr));
    if (client) {
        prepare(client.handle_);
    }
    return client;
}

bool Socket::send(const void * data, size_t n) const {
    const char * from = static_cast<const char *>(data);
    while (n > 0) {
        const auto n_sent = ::send(handle_, from, static_cast<Size>(std::min(n, most_at_once)), no_signal);
        if (n_sent <= 0) {
            if (n_sent < 0 && last_error() == interrupted) {
                continue;
            }
            return false;
        }
        from += n_sent;
        n -= static_cast<size_t>(n_sent);
    }
    return true;
}

bool Socket::receive(void * data, size_t n) const {
    char * to = static_cast<char *>(data);
    while (n > 0) {
        const auto n_received = ::recv(handle_, to, static_cast<Size>(std::min(n, most_at_once)), 0);
        if (n_received <= 0) {
            if (n_received < 0 && last_error() == interrupted) {
                continue;
            }
            return false;
        }
        to += n_received;
        n -= static_cast<size_t>(n_received);
    }
    return true;
}

void Socket::set_timeout(int milliseconds) const {
#ifdef _WIN32
    const DWORD timeout = static_cast<DWORD>(milliseconds);
#else
    const timeval timeout = {milliseconds / 1000, (milliseconds % 1000) * 1000};
#endif
    set_option(handle_, SOL_SOCKET, SO_RCVTIMEO, timeout);
    set_option(handle_, SOL_SOCKET, SO_SNDTIMEO, timeout);
}

void Socket::watch_peer() const {
    set_option(handle_, SOL_SOCKET, SO_KEEPALIVE, 1);
#ifdef __linux__
    set_option(handle_, IPPROTO_TCP, TCP_KEEPIDLE, 15);
    set_option(handle_, IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set_option(handle_, IPPROTO_TCP, TCP_KEEPCNT, 3);
    set_option(handle_, IPPROTO_TCP, TCP_USER_TIMEOUT, 30000); // what was sent and is not confirmed
#endif
}

void Socket::reset_on_close() const {
    linger at_once = {};
    at_once.l_onoff = 1;
    set_option(handle_, SOL_SOCKET, SO_LINGER, at_once);
}

bool Socket::is_connected() const {
    Poll poll = {};
    poll.fd = handle_;
    poll.events = POLLIN;
    if (wait_for(poll, 0) <= 0) {
        return true; // nothing has come, not even an end
    }
    char byte;
    const auto n = ::recv(handle_, &byte, 1, MSG_PEEK | no_wait);
    return n > 0 || (n < 0 && last_error() == no_data);
}

void Socket::shut_down() const {
#ifdef _WIN32
    ::shutdown(handle_, SD_BOTH);
#else
    ::shutdown(handle_, SHUT_RDWR);
#endif
}

} // namespace pyfly
