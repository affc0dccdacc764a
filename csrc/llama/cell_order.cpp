#include "cell_order.h"

#include <algorithm>
#include <numeric>

namespace pyfly {

void CellOrder::write(const void * cache, const ggml_tensor * cells, size_t n_cells) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int32_t> & order = orders_[cache];
    if (order.size() != n_cells) { // another cache, where one was before
        order.resize(n_cells);
        std::iota(order.begin(), order.end(), 0);
    }
    std::vector<bool> is_written(n_cells, false);
    std::vector<int32_t> written;
    for (int64_t i = 0; i < cells->ne[0]; i++) {
        const int64_t cell = cells->type == GGML_TYPE_I64 ? static_cast<const int64_t *>(cells->data)[i]
                                                          : static_cast<const int32_t *>(cells->data)[i];
        if (cell >= 0 && cell < static_cast<int64_t>(n_cells) && !is_written[static_cast<size_t>(cell)]) {
            written.push_back(static_cast<int32_t>(cell));
            is_written[static_cast<size_t>(cell)] = true;
        }
    }
    order.erase(
        std::remove_if(order.begin(), order.end(), [&](int32_t cell) { return is_written[static_cast<size_t>(cell)]; }),
        order.end());
    order.insert(order.end(), written.begin(), written.end());
}

void CellOrder::read(const void * cache, size_t n_cells, int32_t * out) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = orders_.find(cache);
    if (found == orders_.end() || found->second.size() < n_cells) {
        std::iota(out, out + n_cells, 0);
        return;
    }
    std::copy_if(found->second.begin(), found->second.end(), out,
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
