// The inputs of the target's layers, which EAGLE-3 and DFlash heads read, and what must hold of the file of such a
// head.
#pragma once

#include <string>
#include <vector>

#include "llama_target.h"
#include "model_file.h"

namespace pyfly {

// Keeps the inputs of some layers on a target, for as long as it lives, and copies them side by side.
class LayerRows {
  public:
    // Of the layers that `head` names, which require_target_layers() has accepted. The target is borrowed.
    LayerRows(LlamaTarget & target, const llama_model * head);

    // Of these layers. Throws Error(PYFLY_STATUS_INCOMPATIBLE) where the target cannot give them.
    LayerRows(LlamaTarget & target, std::vector<int32_t> layers);
    ~LayerRows();

    LayerRows(const LayerRows &) = delete;
    LayerRows & operator=(const LayerRows &) = delete;

    // Rows of a span of the target's last evaluate(): [n][layers * width] from its token `begin` on.
    size_t width() const { return layers_.size() * width_; }
    void read(size_t span, size_t begin, size_t n, float * out) const;

  private:
    LlamaTarget & target_;
    std::vector<int32_t> layers_;
    size_t width_; // of one layer's input
};

// What must hold before a head's file is loaded: the target publishes the inputs of its layers; what the head borrows
// (token embedding, output matrix) fits, and what it has of its own covers the vocabulary. `what` names it in errors.
// Throws Error(PYFLY_STATUS_INCOMPATIBLE).
void require_layer_head(const llama_model * target, const ModelFile & file, const std::string & what);

// What must hold of the loaded head: it names layers, which the target has. Throws Error(PYFLY_STATUS_INCOMPATIBLE).
void require_target_layers(const llama_model * target, const llama_model * head, const std::string & what);

} // namespace pyfly
