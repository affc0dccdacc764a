// The target: a LlamaModel whose threads and hidden states drafters use.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "layer_tap.h"
#include "llama_model.h"
#include "pyfly.h"
#include "vocabulary.h"

namespace pyfly {

class LlamaTarget : public LlamaModel {
  public:
    // The context is borrowed and gets a thread pool of its thread counts, until the target goes; is_adaptive and
    // is_batch_adaptive say whether they are only the most threads. n_requests: how many of its sequences are used, 0:
    // all. n_ctx: most positions of one request, 0: what the context allows. tap: what the context calls while it
    // evaluates, borrowed; null: nothing. Throws Error(PYFLY_STATUS_INVALID) for a context without memory or
    // vocabulary.
    LlamaTarget(llama_context * context, bool is_adaptive, bool is_batch_adaptive, int32_t n_requests, int32_t n_ctx,
                LayerTap * tap);
    ~LlamaTarget() override { llama_detach_threadpool(context()); }

    int32_t n_ctx() const override { return n_ctx_ > 0 ? n_ctx_ : LlamaModel::n_ctx(); }

    // Switches on (and, as often, off) what heads read after every batch: the hidden states behind the last layer, the
    // inputs of a layer. The model must publish them, or have a tap for the inputs.
    void keep_nextn(bool is_kept);
    void keep_layer_input(uint32_t layer, bool is_kept);

    // Throws Error(PYFLY_STATUS_INCOMPATIBLE) unless the inputs of this layer can be kept.
    void require_layer_input(int32_t layer) const;

    // Rows of a span of the last evaluate(), from its token i on, [n - i][width]: hidden states behind the last layer
    // (null if llama.cpp kept none), inputs of a layer. What is read must be switched on. Valid until the next.
    const float * nextn_rows(size_t span, size_t i) const;
    const float * layer_input_rows(uint32_t layer, size_t span, size_t i) const;

    // The pool of CPU threads that drafters' contexts share with the target's. The target outlives them.
    ThreadPool & thread_pool() const { return *thread_pool_; }

  private:
    // Copies, where the batch that a span was in was not the last one.
    struct Hidden {
        std::vector<float> nextn;
        std::map<uint32_t, std::vector<float>> layers;
    };

    LlamaTarget(llama_context * context, std::unique_ptr<ThreadPool> thread_pool, LayerTap * tap);
    void begin_batch(size_t n) override;
    void keep(size_t span, size_t n) override;

    std::unique_ptr<ThreadPool> thread_pool_;
    LayerTap * tap_; // null where llama.cpp publishes the inputs of layers, or nobody can have them
    int32_t n_ctx_ = 0;
    size_t nextn_width_, layer_width_;
    int32_t n_nextn_users_ = 0;
    std::map<uint32_t, int32_t> n_layer_users_;
    std::map<size_t, Hidden> hidden_; // by span
};

// What a drafter with a model of its own needs; throws Error(PYFLY_STATUS_INVALID) for another target.
LlamaTarget & llama_target(pyfly_target * target);

// What `model` knows of its tokens: which end a text, and which only have a meaning to the chat format.
Vocabulary make_vocabulary(const llama_model * model);

} // namespace pyfly
