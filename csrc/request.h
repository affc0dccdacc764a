// A request of the batch: its slot, its schedule, and what drafting learns from it. No llama.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "policy/outcomes.h"
#include "sequence.h"

namespace pyfly {

// Why a request stopped.
struct Failure {
    pyfly_status status = PYFLY_OK;
    std::string message;
};

// What the std::exception that is being handled says.
Failure current_failure();

// How the draft of a step came about; without a draft, what it begins with.
struct Drafted {
    int32_t n_asked = 0; // how many tokens were asked of a drafter that is not free
    int32_t proposal_class = 0;
    std::vector<float> confidence = {}; // see Proposal
    int32_t dropped = -1;
    bool is_from_answers = false;
};

// When the batch serves a request.
struct Schedule {
    int64_t order = 0;                 // of its beginning: the smaller, the older
    int64_t used = 0;                  // the iteration in which its slot was used last
    int32_t n_room = Model::unlimited; // how many more tokens are wanted, >= 1
    bool is_prepared = false;          // the drafters have caught up with the prompt
    bool is_waiting = false;           // there was no room for it
    bool is_suspect = false;           // a batch with it failed: it is evaluated alone until it has had a step
    bool has_had_step = false;         // in the last iteration
};

// What drafting.* and the governor learn from, once a step is taken.
struct Learning {
    Outcomes outcomes = {};
    Drafted drafted = {};
};

// A slot of the batch and the request in it; the next one takes its place.
struct Request {
    Sequence sequence;
    Schedule schedule = {};
    Learning learning = {};
    size_t n_prompt = 0;  // tokens before the answer
    Failure failure = {}; // why it stopped in the last iteration, if it did

    int32_t slot() const { return sequence.memory().sequence(); }
    int32_t owner() const { return sequence.config().owner; } // of what its slot holds
    bool is_running() const { return sequence.is_active() && !schedule.is_waiting; }
    bool is_midway() const { return is_running() && sequence.n_steps() > 0; } // somebody waits for its next token

    // A request begins here, or goes on somewhere else.
    void begin();

    // It has taken what came of a step: less is wanted now.
    void had_step();

    // It stops because of the exception that is being handled. has_evaluated: see Sequence::fail.
    void stop(bool has_evaluated);

    // There is no room for it: it waits, and what it had is forgotten.
    void make_wait();
};

} // namespace pyfly
