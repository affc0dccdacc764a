// How many threads the next evaluation gets, from what the ones before showed. No llama.h, no clock.
// docs/design/threads.md
//
// ggml's threads meet at a barrier after every node of the graph, so an evaluation is as slow as its slowest thread,
// and a thread without a core holds up all others. Threads that compute or spin use a core each; where the process got
// clearly fewer cores than it has threads, some were waiting for one, and as many threads as there were cores are put
// on trial. Other things look the same (a GPU computes, barriers sleep), so the time decides: a trial stays only if the
// same evaluations became faster. Upwards likewise, when cores are seen to be free.
#pragma once

#include <cstdint>
#include <vector>

namespace pyfly {

class ThreadPolicy {
  public:
    // n_max >= 1: threads on a free machine. sees_cores: observe_cores() will be called.
    ThreadPolicy(int32_t n_max, bool sees_cores);

    // Before the first evaluation: cores that are free, >= 0, for which it begins with so many threads.
    void begin_with(double n_cores);

    int32_t n_threads() const { return trial_ > 0 ? trial_ : n_; }
    int32_t n_max() const { return n_max_; }
    int64_t n_changes() const { return n_changes_; } // of the thread count for good, trials that failed not among them
    int64_t n_trials() const { return n_trials_; }

    // One that ran with n_threads().
    struct Evaluation {
        uint64_t context; // which model
        int32_t n_rows;   // >= 1
        double us;        // that it took, > 0
        double cpu_us;    // CPU time of the process meanwhile
    };
    void observe(const Evaluation & evaluation);

    // Whether free cores would be made use of.
    bool wants_cores() const { return sees_cores_ && n_ < n_max_ && trial_ == 0; }

    // Cores that this process used or could have used of late, >= 0.
    void observe_cores(double n_cores) { seen_cores_ = n_cores; }

  private:
    // What evaluations of one context and one number of rows (or about one, of large batches) took.
    struct Kind {
        uint64_t context;
        int32_t size_class;
        double us, n_rows;
        bool is_of(const Evaluation & e) const {
            return context == e.context && size_class == ThreadPolicy::size_class(e.n_rows);
        }
    };
    using Kinds = std::vector<Kind>;

    static int32_t size_class(int32_t n_rows);
    static void add(Kinds & kinds, const Evaluation & e);
    static double expected(const Kinds & kinds, const Evaluation & e);
    void observe_trial(const Evaluation & e);
    void close_window();
    void start_trial(int32_t n);
    void end_trial(bool stays);

    int32_t n_max_;
    bool sees_cores_;
    int32_t n_;
    int64_t n_changes_ = 0, n_trials_ = 0;
    double wait_us_ = 0.0;          // of evaluating, before the next trial
    double cores_of_failure_ = 0.0; // seen before the trial that it is for, if that was upwards; else n_max

    // The window: evaluations with n_ threads that are judged together.
    Kinds window_;
    double us_ = 0.0, cpu_us_ = 0.0, seen_cores_ = 0.0;
    int32_t n_low_ = 0; // windows in a row, kept together, in which cores were missing

    // The thread count that n_ was last compared with, and its times: they show when it has become the better one.
    int32_t other_ = 0; // 0: none
    Kinds with_other_;
    double comparable_us_ = 0.0, with_other_us_ = 0.0; // of the window's evaluations that it knows: with n_, with it

    // The trial.
    int32_t trial_ = 0; // threads; 0: none
    Kinds reference_;   // the window before it
    Kinds on_trial_;
    double trial_cores_ = 0.0; // seen before it
    double spent_us_ = 0.0, expected_us_ = 0.0,
           unknown_us_ = 0.0; // by its evaluations that the reference knows, and by the reference
    int32_t n_evaluated_ = 0;
};

} // namespace pyfly
