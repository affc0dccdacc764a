// The bits of results as one number, to compare instruction sets that no machine has together, and numbers for it that
// every standard library makes alike: distributions of the standard library differ.
#pragma once

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

// FNV-1a, 64 bits (draft-eastlake-fnv).
class Bits {
  public:
    void add(const void * data, size_t size) {
        const unsigned char * bytes = static_cast<const unsigned char *>(data);
        for (size_t i = 0; i < size; i++) {
            hash_ = (hash_ ^ bytes[i]) * 1099511628211U;
        }
    }
    template <class Number> void add(const std::vector<Number> & numbers) {
        add(numbers.data(), numbers.size() * sizeof(Number));
    }
    uint64_t all() const { return hash_; }
    std::string in_hex() const {
        char text[17];
        std::snprintf(text, sizeof(text), "%016llX", static_cast<unsigned long long>(hash_));
        return text;
    }

  private:
    uint64_t hash_ = 14695981039346656037U;
};

// Nearly normal, of variance 1: the sum of four numbers that are all as probable.
inline float bell(std::mt19937 & random) {
    int sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += static_cast<int>(random() % 8001) - 4000;
    }
    return static_cast<float>(sum) * 2.165e-4f;
}
