// Prefill, the round loop, rollback and the counters of one sequence. No llama.h.
#pragma once

#include <memory>
#include <vector>

#include "drafters/drafter.h"
#include "gates.h"
#include "governor.h"
#include "pyfly.h"
#include "sampler.h"
#include "target.h"
#include "window.h"

namespace pyfly {

struct EngineConfig {
    Gate gate;
    pyfly_window_config window;
    bool adaptive;
    bool trace;
    bool keep_rows;
    bool resumable;
};

struct EngineDrafter {
    Drafter * drafter; // borrowed
    int32_t draft_max; // most tokens it drafts in a round
};

// The state between two rounds:
//   history   committed tokens, then provisional ones (from the window's oldest open mismatch on)
//   memory    the target has evaluated history[0 .. n_memory), n_memory < history.size(): the last token is evaluated
//             by the next round, whose first row it yields; so are those before it that a recurrent target had to
//             forget
//   pending   records of the provisional tokens, and for every open mismatch what rolling back to it needs
class Engine {
  public:
    // The target is borrowed.
    explicit Engine(Target & target);

    // See pyfly_engine_configure. Throws Error(PYFLY_STATUS_INVALID) while a sequence runs.
    void configure(EngineConfig config, std::vector<EngineDrafter> drafters);
    bool keeps_shaped_rows() const { return !config_.gate.is_exact() || config_.trace; }

    void begin(std::vector<int32_t> history, size_t n_evaluated, std::unique_ptr<Sampler> sampler);
    void resume(size_t n_keep, const int32_t * tokens, size_t n_tokens);
    size_t prefill(bool all_rows);
    const float * prompt_row(int32_t position) const;
    size_t round(int32_t n_room);
    void park(size_t n_keep);
    void end(size_t n_keep);

    const std::vector<pyfly_record> & records() const { return records_; }
    const std::vector<int32_t> & rejected() const { return rejected_; }
    const float * record_row(size_t i) const;
    const std::vector<int32_t> & history() const { return history_; }
    size_t n_evaluated() const { return n_memory_; }
    const pyfly_stats & stats() const { return stats_; }
    void reset_stats() { stats_ = {}; }
    const Governor & governor() const { return governor_; }

    Target & target() { return target_; }

  private:
    // A token whose fate may still be open.
    struct Pending {
        pyfly_record record;
        std::vector<int32_t> rejected;    // drafts rejected at this position
        std::vector<float> row;           // raw row, if rows are kept
        std::unique_ptr<Sampler> sampler; // if resumable: as it was just after this token; null while it still is so
    };

    // A deferred mismatch whose window is open.
    struct Open {
        int64_t position;
        std::unique_ptr<Sampler> sampler; // as it was just after the target's own choice was accepted
        pyfly_record choice;              // the record of that choice, should the window break
    };

    // What a round drafts.
    struct Proposal {
        int32_t drafter = -1; // index, -1: none
        int32_t n_asked = 0;  // by the governor, of a drafter that is not free
        int32_t proposal_class = 0;
        std::vector<int32_t> tokens;
    };

    // A free proposal that was not verified: what comes next shows whether it would have been right.
    struct Shadow {
        Proposal proposal;
        size_t position; // of its first token
    };

    bool is_limited() const { return target_.rewind_depth() != Target::unlimited; }
    int64_t draft_max() const;
    void require_sequence(const std::vector<int32_t> & history) const;
    void evaluate(const int32_t * tokens, size_t n, size_t first_row);
    void catch_up(size_t n);
    void checkpoint();
    void keep(size_t n);
    Proposal propose(int32_t n_room);
    Proposal draft_first(int64_t n_max);
    Proposal draft_best(int64_t n_max);
    size_t prepare(size_t drafter);
    void draft_with(size_t drafter, int64_t n_max, Proposal & proposal);
    void learn(const Proposal & proposal, size_t n_before);
    void verify(const Proposal & proposal, size_t first_row);
    bool verify_position(const Proposal & proposal, size_t i, const float * row);
    void fall_back();
    void push(const pyfly_record & record, const float * row, std::vector<int32_t> rejected);
    void settle(const Window::Outcome & outcome);
    void roll_back(const Window::Rejection & rejection);
    void count_rejection(const pyfly_record & record);
    void commit();
    void truncate_memory(size_t n);
    void measure(pyfly_record & record) const;

    Target & target_;
    std::vector<EngineDrafter> drafters_;
    EngineConfig config_;
    Governor governor_;
    std::vector<Shadow> shadows_;
    Window window_;
    std::unique_ptr<Sampler> sampler_;
    std::vector<int32_t> history_;
    size_t n_memory_ = 0;
    std::vector<int32_t> checkpoint_; // the tokens whose state the target's checkpoint is
    bool is_active_ = false;          // rounds may follow
    bool has_sequence_ = false;       // from begin() to end(), also after an error
    bool is_broken_ = false;          // evaluating failed
    int32_t round_ = 0;
    std::vector<Pending> pending_;
    std::vector<Open> open_;
    int32_t prompt_row_begin_ = 0, prompt_row_end_ = 0; // positions whose rows the last prefill kept
    std::vector<pyfly_record> records_;
    std::vector<int32_t> rejected_;
    std::vector<std::vector<float>> record_rows_;
    std::vector<std::unique_ptr<Sampler>> record_samplers_; // as Pending::sampler
    pyfly_stats stats_ = {};
};

} // namespace pyfly
