// Times what it lives through.
#pragma once

#include <chrono>
#include <cstdint>

namespace pyfly {

// Microseconds since some moment, never fewer than before.
inline int64_t now_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Adds the microseconds of its own life to a counter.
class Stopwatch {
  public:
    explicit Stopwatch(int64_t & counter) : counter_(counter), start_(now_us()) {}
    ~Stopwatch() { counter_ += now_us() - start_; }
    Stopwatch(const Stopwatch &) = delete;
    Stopwatch & operator=(const Stopwatch &) = delete;

  private:
    int64_t & counter_;
    int64_t start_;
};

} // namespace pyfly
