// The inputs of layers where llama.cpp's graph does not publish them: taken from the graph while it is evaluated.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "llama.h"

namespace pyfly {

// The input of layer k is the node "l_out-(k - 1)", which all architectures name alike that name it at all. The
// evaluation stops shortly behind each node that is kept, and nowhere else. For one context, on one thread at a time.
class LayerTap {
  public:
    // A ggml_backend_sched_eval_callback; `tap` is a LayerTap.
    static bool on_node(ggml_tensor * node, bool asks, void * tap);

    void keep(uint32_t layer, bool is_kept);

    // A batch of n tokens is about to be evaluated: the rows of the last one are gone.
    void begin(size_t n);

    // Rows [n][width] of the last batch; null if there are not as many, because the graph has no such node.
    const float * rows(uint32_t layer, size_t width) const;

  private:
    size_t n_ = 0; // tokens of the batch
    std::map<uint32_t, std::vector<float>> rows_;
};

// How the inputs of a model's layers can be read.
enum class LayerInputs { none, published, tapped };

// Not tapped: recurrent models, whose batches llama.cpp reorders, and where a GPU may compute, because a callback would
// slow down what it does.
LayerInputs layer_inputs(const llama_model * model);
LayerInputs layer_inputs(const std::string & architecture, bool is_recurrent);

} // namespace pyfly
