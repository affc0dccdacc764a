// In which order the cells of a cache were written: of one sequence that is the order of its tokens, wherever they lie.
// Attention adds up in this order, so that a text does not depend on what else is, or was, in the cache.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "ggml_internal.h"

namespace pyfly {

class CellOrder {
  public:
    // Cells of the cache that begins at `cache` are written, one after the other; it has n_cells. Takes as
    // many steps as there are cells to write, and if one was written before, as many as ever were.
    void write(const void * cache, const ggml_tensor * cells, size_t n_cells);

    // The first n_cells cells of a cache, those that were written last at the end; the others, whose content came in
    // another way, before them as they lie.
    void read(const void * cache, size_t n_cells, int32_t * out);

  private:
    enum class Mark : uint8_t { never, before, now }; // when a cell is written
    struct Written {
        std::vector<int32_t> cells; // in their order
        std::vector<Mark> marks;    // of every cell
    };

    std::mutex mutex_; // contexts compute at the same time
    std::map<const void *, Written> caches_;
};

// Sees which cells a graph writes, and leaves the writing to llama.cpp.
class CellWriter : public ggml_internal::TensorTraits {
  public:
    explicit CellWriter(CellOrder & order) : order_(order) {}

    // Whether this operation writes to a cache of one stream.
    static bool is_write(const ggml_tensor * op);

    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override;
    bool compute_forward(ggml_internal::ComputeParams * params, ggml_tensor * op) override;

  private:
    CellOrder & order_;
};

} // namespace pyfly
