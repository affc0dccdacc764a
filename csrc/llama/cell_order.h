// In which order the cells of a cache were written: of one sequence that is the order of its tokens, wherever they lie.
// Attention adds up in this order, so that a request does not depend on what else is, or was, in the cache.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "release_ggml.h"

namespace pyfly {

// Whether cells of this type can be attended to by CpuAttention: F16, BF16, Q8_0, Q4_0.
bool are_cells(ggml_type type);

// One cache of llama.cpp is one buffer, whose layers all have the same cells; CellOrder knows it by the buffer's
// address.
class CellOrder {
  public:
    // Cells of a cache of n_cells are written, one after the other. Takes as many steps as there are cells to write.
    void write(const void * cache, const ggml_tensor * cells, size_t n_cells);

    // Cells first..first + n - 1 of a cache that is known are written by something that is no graph: a state is
    // restored.
    void restore(const void * cache, size_t first, size_t n, size_t n_cells);

    // The first n_cells cells of a cache, those that were written last at the end; the others, whose content came in
    // another way, before them as they lie.
    void read(const void * cache, size_t n_cells, int32_t * out);

    // The cache is gone.
    void forget(const void * cache);

    size_t n_caches(); // that are known

  private:
    // `cells` in their order; if a cell is there twice, the one counts that places[cell] is the index of. -1: never
    // written.
    struct Written {
        std::vector<int32_t> cells, places;

        bool is_latest(size_t i) const { return places[static_cast<size_t>(cells[i])] == static_cast<int32_t>(i); }
        bool ends_with(const std::vector<int32_t> & last) const;
        void append(int32_t cell);
        void compact();
    };

    void append(const void * cache, const std::vector<int32_t> & cells, size_t n_cells);

    std::map<const void *, Written> caches_;
};

// Sees which cells a graph writes, and leaves the writing to llama.cpp. From then on it also sees that the buffer is
// freed, and that a state is restored into it.
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
