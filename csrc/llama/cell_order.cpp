#include "cell_order.h"

#include <algorithm>
#include <numeric>

namespace pyfly {

void CellOrder::write(const void * cache, const ggml_tensor * cells, size_t n_cells) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Written & written = caches_[cache];
    if (written.marks.size() != n_cells) { // another cache, where one was before
        written = {{}, std::vector<Mark>(n_cells, Mark::never)};
    }
    const auto each_cell = [&](auto use) {
        for (int64_t i = 0; i < cells->ne[0]; i++) {
            const int64_t cell = cells->type == GGML_TYPE_I64 ? static_cast<const int64_t *>(cells->data)[i]
                                                              : static_cast<const int32_t *>(cells->data)[i];
            if (cell >= 0 && static_cast<size_t>(cell) < n_cells) {
                use(static_cast<int32_t>(cell), written.marks[static_cast<size_t>(cell)]);
            }
        }
    };
    bool is_any_again = false;
    each_cell([&](int32_t, Mark & mark) {
        is_any_again = is_any_again || mark == Mark::before;
        mark = Mark::now;
    });
    if (is_any_again) {
        written.cells.erase(
            std::remove_if(written.cells.begin(), written.cells.end(),
                           [&](int32_t cell) { return written.marks[static_cast<size_t>(cell)] == Mark::now; }),
            written.cells.end());
    }
    each_cell([&](int32_t cell, Mark & mark) {
        if (mark == Mark::now) { // else it is there twice
            written.cells.push_back(cell);
            mark = Mark::before;
        }
    });
}

void CellOrder::read(const void * cache, size_t n_cells, int32_t * out) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = caches_.find(cache);
    if (found == caches_.end() || found->second.marks.size() < n_cells) {
        std::iota(out, out + n_cells, 0);
        return;
    }
    const Written & written = found->second;
    for (size_t cell = 0; cell < n_cells; cell++) {
        if (written.marks[cell] == Mark::never) {
            *out++ = static_cast<int32_t>(cell);
        }
    }
    std::copy_if(written.cells.begin(), written.cells.end(), out,
                 [&](int32_t cell) { return cell < static_cast<int32_t>(n_cells); });
}

bool CellWriter::is_write(const ggml_tensor * op) {
    const ggml_tensor * cache = op->view_src;
    return cache != nullptr && cache->type == GGML_TYPE_F16 && op->data == cache->data && cache->ne[2] == 1 &&
           op->ne[1] == cache->ne[1] && op->src[1]->ne[1] == 1 && op->src[1]->ne[2] == 1;
}

bool CellWriter::work_size(int, const ggml_tensor *, size_t &) {
    return false;
}

bool CellWriter::compute_forward(ggml_internal::ComputeParams * params, ggml_tensor * op) {
    if (params->thread == 0) {
        order_.write(op->data, op->src[1], static_cast<size_t>(op->ne[1]));
    }
    return false;
}

} // namespace pyfly
