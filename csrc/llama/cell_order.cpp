#include "cell_order.h"

#include <algorithm>
#include <mutex>
#include <numeric>

#include "fork_safe.h"

namespace pyfly {

namespace {

using ggml_internal::Buffer;
using ggml_internal::BufferFunctions;

// Of every order, and of the buffers that are watched: contexts compute at the same time.
std::mutex mutex;
[[maybe_unused]] const bool is_held_over_forks = hold_over_forks<mutex>();

// ---- Buffers of caches, watched -------------------------------------------------------------------------------------

struct Watched {
    BufferFunctions functions; // its own, before they became ours
    CellOrder * order;
};

auto & watched = *new std::map<ggml_backend_buffer_t, Watched>; // contexts may be freed when the process ends

Watched find(ggml_backend_buffer_t buffer) {
    const std::lock_guard<std::mutex> lock(mutex);
    return watched.at(buffer);
}

void free_buffer(ggml_backend_buffer_t buffer) {
    const Watched own = find(buffer);
    {
        const std::lock_guard<std::mutex> lock(mutex);
        watched.erase(buffer);
    }
    own.order->forget(buffer);
    if (own.functions.free_buffer != nullptr) {
        own.functions.free_buffer(buffer);
    }
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    const Watched own = find(buffer);
    own.functions.set_tensor(buffer, tensor, data, offset, size);
    const size_t row = tensor->nb[1]; // a cell
    if (offset % row == 0 && size % row == 0) {
        own.order->restore(buffer, offset / row, size / row, static_cast<size_t>(tensor->ne[1]));
    }
}

void watch(ggml_backend_buffer_t buffer, CellOrder & order) {
    const std::lock_guard<std::mutex> lock(mutex);
    Buffer * const own = reinterpret_cast<Buffer *>(buffer);
    if (own->functions.set_tensor != set_tensor && own->functions.set_tensor != nullptr) {
        watched[buffer] = {own->functions, &order};
        own->functions.free_buffer = free_buffer;
        own->functions.set_tensor = set_tensor;
    }
}

} // namespace

bool are_cells(ggml_type type) {
    return type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0;
}

// ---- The order ------------------------------------------------------------------------------------------------------

bool CellOrder::Written::ends_with(const std::vector<int32_t> & last) const {
    if (cells.size() < last.size() || !std::equal(last.rbegin(), last.rend(), cells.rbegin())) {
        return false;
    }
    for (size_t i = cells.size() - last.size(); i < cells.size(); i++) {
        if (!is_latest(i)) {
            return false;
        }
    }
    return true;
}

void CellOrder::Written::append(int32_t cell) {
    if (cells.size() >= 2 * places.size()) {
        compact();
    }
    places[static_cast<size_t>(cell)] = static_cast<int32_t>(cells.size());
    cells.push_back(cell);
}

void CellOrder::Written::compact() {
    size_t n = 0;
    for (size_t i = 0; i < cells.size(); i++) {
        if (is_latest(i)) {
            places[static_cast<size_t>(cells[i])] = static_cast<int32_t>(n);
            cells[n++] = cells[i];
        }
    }
    cells.resize(n);
}

void CellOrder::append(const void * cache, const std::vector<int32_t> & cells, size_t n_cells) {
    Written & written = caches_[cache];
    if (written.places.size() != n_cells) { // another cache, where one was before
        written = {{}, std::vector<int32_t>(n_cells, -1)};
    }
    if (!written.ends_with(cells)) { // else it is the next layer
        for (const int32_t cell : cells) {
            written.append(cell);
        }
    }
}

void CellOrder::write(const void * cache, const ggml_tensor * cells, size_t n_cells) {
    std::vector<int32_t> own;
    for (int64_t i = 0; i < cells->ne[0]; i++) {
        const int64_t cell = cells->type == GGML_TYPE_I64 ? static_cast<const int64_t *>(cells->data)[i]
                                                          : static_cast<const int32_t *>(cells->data)[i];
        if (cell >= 0 && static_cast<size_t>(cell) < n_cells) {
            own.push_back(static_cast<int32_t>(cell));
        }
    }
    const std::lock_guard<std::mutex> lock(mutex);
    append(cache, own, n_cells);
}

void CellOrder::restore(const void * cache, size_t first, size_t n, size_t n_cells) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = caches_.find(cache);
    if (found != caches_.end() && found->second.places.size() == n_cells && first + n <= n_cells) {
        std::vector<int32_t> own(n);
        std::iota(own.begin(), own.end(), static_cast<int32_t>(first));
        append(cache, own, n_cells);
    }
}

void CellOrder::read(const void * cache, size_t n_cells, int32_t * out) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = caches_.find(cache);
    if (found == caches_.end() || found->second.places.size() < n_cells) {
        std::iota(out, out + n_cells, 0);
        return;
    }
    const Written & written = found->second;
    for (size_t cell = 0; cell < n_cells; cell++) {
        if (written.places[cell] < 0) {
            *out++ = static_cast<int32_t>(cell);
        }
    }
    for (size_t i = 0; i < written.cells.size(); i++) {
        if (written.is_latest(i) && static_cast<size_t>(written.cells[i]) < n_cells) {
            *out++ = written.cells[i];
        }
    }
}

void CellOrder::forget(const void * cache) {
    const std::lock_guard<std::mutex> lock(mutex);
    caches_.erase(cache);
}

size_t CellOrder::n_caches() {
    const std::lock_guard<std::mutex> lock(mutex);
    return caches_.size();
}

// ---- What graphs write ----------------------------------------------------------------------------------------------

bool CellWriter::is_write(const ggml_tensor * op) {
    const ggml_tensor * cache = op->view_src;
    return cache != nullptr && cache->buffer != nullptr && are_cells(cache->type) && op->data == cache->data &&
           cache->ne[2] == 1 && op->ne[1] == cache->ne[1] && op->src[1]->ne[1] == 1 && op->src[1]->ne[2] == 1;
}

bool CellWriter::work_size(int, const ggml_tensor *, size_t &) {
    return false;
}

bool CellWriter::compute_forward(ggml_internal::ComputeParams * params, ggml_tensor * op) {
    if (params->thread == 0) {
        const ggml_tensor * cache = op->view_src;
        watch(cache->buffer, order_);
        order_.write(cache->buffer, op->src[1], static_cast<size_t>(op->ne[1]));
    }
    return false;
}

} // namespace pyfly
