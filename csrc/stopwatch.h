// Times what it lives through.
#pragma once

#include <chrono>
#include <cstdint>

namespace pyfly {

// Adds the microseconds of its own life to a counter.
class Stopwatch {
  public:
    explicit Stopwatch(int64_t & counter) : counter_(counter), start_(std::chrono::steady_clock::now()) {}
    ~Stopwatch() {
        counter_ +=
            std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start_).count();
    }
    Stopwatch(const Stopwatch &) = delete;
    Stopwatch & operator=(const Stopwatch &) = delete;

  private:
    int64_t & counter_;
    std::chrono::steady_clock::time_point start_;
};

} // namespace pyfly
