// States of one sequence that a recurrent memory can go back to. No llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace pyfly {

// Each is a copy of the state behind so many first tokens of the sequence. One, the latest, is for a draft that may be
// rejected: the next one takes its place. The others are kept, for requests that will begin alike: where a turn ends,
// before an answer's thoughts, at the end of what others begin with.
class Checkpoints {
  public:
    using State = std::shared_ptr<const std::vector<uint8_t>>; // sequences that begin alike share it
    struct Checkpoint {
        int32_t n; // positions, >= 1
        State state;
        bool is_kept;
    };

    // By n, ascending.
    const std::vector<Checkpoint> & all() const { return all_; }

    // The longest of at most n positions; nullptr: there is none.
    const Checkpoint * longest(int32_t n) const;

    // The longest of at most n positions that is kept: its positions, 0 if there is none.
    int32_t n_kept(int32_t n) const;

    // Where a state can be written, to be given to add(): that of the last draft, if nobody else has it.
    std::shared_ptr<std::vector<uint8_t>> take_buffer();

    // The one that was not kept goes; so does another one of n positions.
    void add(int32_t n, State state, bool is_kept);

    // Adds those of another sequence that are kept, of at most its first n positions, with which this one now begins.
    void share(const Checkpoints & from, int32_t n);

    bool has(int32_t n) const;

    // What is there of n positions stays from now on.
    void keep(int32_t n);

    // Those of more than n positions go.
    void forget_behind(int32_t n);

    void drop(int32_t n);

  private:
    std::vector<Checkpoint> all_;
};

// Bounds what the sequences of one model keep: drops the kept ones that save least, until there are at most `n_most` of
// each sequence and at most `most_bytes` of all; never the one that was added last, of n_last positions of sequence
// `last`, and four of all may stay, however large. What one saves: the positions behind the kept one before it.
void bound(const std::vector<Checkpoints *> & sequences, size_t last, int32_t n_last, size_t n_most, size_t most_bytes);

} // namespace pyfly
