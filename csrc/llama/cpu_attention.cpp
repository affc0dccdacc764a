#include "cpu_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/attention.h"

namespace pyfly {

namespace {

using ggml_internal::ComputeParams;
using kernels::tile;

constexpr size_t most_scores = size_t{1} << 20; // floats of rows that are taken together
constexpr size_t most_queries = 256;            // of a tile at once
constexpr uint16_t minus_infinity = 0xFC00;     // in F16

size_t size_of(const ggml_tensor * tensor, int dimension) {
    return static_cast<size_t>(tensor->ne[dimension]);
}

template <class T> T * at(const ggml_tensor * tensor, size_t i1, size_t i2, size_t i3) {
    return reinterpret_cast<T *>(static_cast<char *>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] +
                                 i3 * tensor->nb[3]);
}

// The sizes of an operation: q[key_size, n_rows, n_heads, n_streams], k[key_size, n_cells, n_groups, n_streams],
// v[value_size, n_cells, n_groups, n_streams], mask[n_cells, n_rows, 1, 1 or n_streams], sinks[n_heads] or none, and
// out[value_size, n_heads, n_rows, n_streams]. A group is the heads that share keys and values.
struct Shape {
    size_t key_size, value_size, n_rows, n_heads, n_streams, n_groups, n_each, n_cells, n_tiles;
    size_t n_together; // rows whose scores the work memory holds

    explicit Shape(const ggml_tensor * op)
        : key_size(size_of(op->src[1], 0)), value_size(size_of(op->src[2], 0)), n_rows(size_of(op->src[0], 1)),
          n_heads(size_of(op->src[0], 2)), n_streams(size_of(op->src[0], 3)), n_groups(size_of(op->src[1], 2)),
          n_each(n_heads / n_groups), n_cells(size_of(op->src[1], 1)), n_tiles((n_cells + tile - 1) / tile),
          n_together(std::clamp<size_t>(most_scores / (n_heads * n_tiles * tile), 1, n_rows)) {}
};

// The work memory of all threads.
struct Work {
    size_t n_converted; // floats of each thread
    float * scores;     // [n_together][n_heads][n_tiles][tile]
    float * divisors;   // [n_together][n_heads]: of each head's weights
    float * converted;  // [n_threads][n_converted]: cells as floats
    int32_t * order;    // [n_cells]: the cells, as attention takes them
    uint8_t * sees;     // [n_together][n_tiles]: whether a row sees a cell of a tile
    size_t size;        // bytes

    // At `memory`; null where only the size is asked for.
    Work(const Shape & shape, size_t n_threads, void * memory)
        : n_converted(tile * std::max(shape.key_size, shape.value_size)) {
        char * const begin = static_cast<char *>(memory);
        size = 0;
        const auto take = [&](auto *& part, size_t n) {
            using Number = std::remove_reference_t<decltype(*part)>;
            part = memory != nullptr ? reinterpret_cast<Number *>(begin + size) : nullptr;
            size += n * sizeof(Number);
        };
        take(scores, shape.n_together * shape.n_heads * shape.n_tiles * tile);
        take(divisors, shape.n_together * shape.n_heads);
        take(converted, n_threads * n_converted);
        take(order, shape.n_cells);
        take(sees, shape.n_together * shape.n_tiles);
    }
};

// Rows first..first + n - 1 of a stream, in three steps; all threads wait for each other behind each.
class Rows {
  public:
    Rows(const ComputeParams & params, const ggml_tensor * op, const Shape & shape, const Work & work, size_t stream,
         size_t first, size_t n)
        : op_(op), shape_(shape), work_(work), stream_(stream), first_(first), n_(n),
          thread_(static_cast<size_t>(params.thread)), n_threads_(static_cast<size_t>(params.n_threads)),
          converted_(work.converted + thread_ * work.n_converted) {
        std::memcpy(&scale_, op->op_params, sizeof(float));
        std::memcpy(&cap_, op->op_params + 2, sizeof(float));
        scale_ /= cap_ != 0.0f ? cap_ : 1.0f;
    }

    // Queries by keys.
    void score() {
        for (size_t task = thread_; task < shape_.n_tiles * shape_.n_groups; task += n_threads_) {
            score_tile(task / shape_.n_groups, task % shape_.n_groups);
        }
    }

    // Scores become weights, and each head gets its divisor.
    void weigh() {
        for (size_t task = thread_; task < n_ * shape_.n_heads; task += n_threads_) {
            weigh_head(task / shape_.n_heads, task % shape_.n_heads);
        }
    }

    // Weights by values. A task is some columns of the values of a group.
    void add() {
        size_t n_columns = shape_.value_size;
        while (n_columns % 16 == 0 && shape_.value_size / n_columns * shape_.n_groups < n_threads_) {
            n_columns /= 2;
        }
        const size_t n_parts = shape_.value_size / n_columns;
        for (size_t task = thread_; task < n_parts * shape_.n_groups; task += n_threads_) {
            add_columns(task / n_parts, task % n_parts * n_columns, n_columns);
        }
    }

  private:
    float * scores(size_t r, size_t head, size_t t) const {
        return work_.scores + ((r * shape_.n_heads + head) * shape_.n_tiles + t) * tile;
    }

    uint8_t & sees(size_t r, size_t t) const { return work_.sees[r * shape_.n_tiles + t]; }

    // A tile of keys or values.
    struct Tile {
        const uint16_t * rows[tile];
        int n;

        Tile(const Rows & of, const ggml_tensor * numbers, size_t group, size_t t, size_t column = 0)
            : n(static_cast<int>(std::min<size_t>(tile, of.shape_.n_cells - t * tile))) {
            for (int c = 0; c < n; c++) {
                rows[c] = at<const uint16_t>(numbers, of.cell(t, c), group, of.stream_) + column;
            }
        }

        kernels::Cells cells() const { return {rows, n}; }
    };

    // The cell that is number c of a tile.
    size_t cell(size_t t, int c) const { return static_cast<size_t>(work_.order[t * tile + static_cast<size_t>(c)]); }

    // What is added to the scores of a row's tile, F16.
    void read_mask(size_t r, size_t t, int n, uint16_t * out) const {
        const uint16_t * row = at<const uint16_t>(op_->src[3], first_ + r, 0, stream_ % size_of(op_->src[3], 3));
        for (int c = 0; c < n; c++) {
            out[c] = row[cell(t, c)];
        }
    }

    float * out(size_t r, size_t head) const { return at<float>(op_, head, first_ + r, stream_); }

    void score_tile(size_t t, size_t group) {
        const Tile keys(*this, op_->src[1], group, t);
        const float * queries[most_queries];
        float * into[most_queries];
        size_t n_queries = 0;
        const auto flush = [&] {
            kernels::attention()->dot_products(keys.cells(), static_cast<int>(shape_.key_size), queries,
                                               static_cast<int>(n_queries), into, converted_);
            n_queries = 0;
        };
        bool is_seen[most_queries];
        for (size_t begin = 0; begin < n_; begin += most_queries) {
            const size_t end = std::min(n_, begin + most_queries);
            for (size_t r = begin; r < end; r++) {
                uint16_t hides[tile];
                read_mask(r, t, keys.n, hides);
                is_seen[r - begin] =
                    std::any_of(hides, hides + keys.n, [](uint16_t value) { return value != minus_infinity; });
                for (size_t h = 0; is_seen[r - begin] && h < shape_.n_each; h++) {
                    if (n_queries == most_queries) {
                        flush();
                    }
                    const size_t head = group * shape_.n_each + h;
                    queries[n_queries] = at<const float>(op_->src[0], first_ + r, head, stream_);
                    into[n_queries++] = scores(r, head, t);
                }
            }
            flush();
            for (size_t r = begin; r < end; r++) {
                if (group == 0) {
                    sees(r, t) = is_seen[r - begin];
                }
                if (is_seen[r - begin]) {
                    finish_scores(r, t, group, keys.n);
                }
            }
        }
    }

    // Scale, cap and mask.
    void finish_scores(size_t r, size_t t, size_t group, int n) const {
        float bias[tile];
        std::fill(bias, bias + tile, -INFINITY);
        uint16_t halves[tile];
        read_mask(r, t, n, halves);
        ggml_fp16_to_fp32_row(halves, bias, n);
        for (size_t head = group * shape_.n_each; head < (group + 1) * shape_.n_each; head++) {
            float * own = scores(r, head, t);
            std::fill(own + n, own + tile, 0.0f);
            for (int c = 0; c < tile; c++) {
                own[c] *= scale_;
            }
            for (int c = 0; cap_ != 0.0f && c < n; c++) {
                own[c] = cap_ * std::tanh(own[c]);
            }
            for (int c = 0; c < tile; c++) {
                own[c] += bias[c];
            }
        }
    }

    void weigh_head(size_t r, size_t head) {
        const kernels::Attention & kernel = *kernels::attention();
        const float * sinks = op_->src[4] != nullptr ? static_cast<const float *>(op_->src[4]->data) : nullptr;
        float most = sinks != nullptr ? sinks[head] : -INFINITY;
        for (size_t t = 0; t < shape_.n_tiles; t++) {
            most = sees(r, t) ? std::max(most, kernel.largest(scores(r, head, t), tile)) : most;
        }
        float sum = 0.0f;
        for (size_t t = 0; t < shape_.n_tiles; t++) {
            if (sees(r, t)) {
                float * own = scores(r, head, t);
                kernel.exponentials(own, tile, most);
                for (int c = 0; c < tile; c++) {
                    sum += own[c];
                }
            }
        }
        sum += sinks != nullptr ? std::exp(sinks[head] - most) : 0.0f;
        work_.divisors[r * shape_.n_heads + head] = sum;
    }

    void add_columns(size_t group, size_t column, size_t n_columns) {
        const size_t first_head = group * shape_.n_each;
        for (size_t r = 0; r < n_; r++) {
            for (size_t h = 0; h < shape_.n_each; h++) {
                std::fill_n(out(r, first_head + h) + column, n_columns, 0.0f);
            }
        }
        const float * weights[most_queries];
        float * into[most_queries];
        for (size_t t = 0; t < shape_.n_tiles; t++) {
            const Tile values(*this, op_->src[2], group, t, column);
            size_t n_queries = 0;
            const auto flush = [&] {
                kernels::attention()->add_weighted(values.cells(), static_cast<int>(n_columns), weights,
                                                   static_cast<int>(n_queries), into, converted_);
                n_queries = 0;
            };
            for (size_t r = 0; r < n_; r++) {
                for (size_t h = 0; sees(r, t) && h < shape_.n_each; h++) {
                    if (n_queries == most_queries) {
                        flush();
                    }
                    weights[n_queries] = scores(r, first_head + h, t);
                    into[n_queries++] = out(r, first_head + h) + column;
                }
            }
            flush();
        }
        for (size_t r = 0; r < n_; r++) {
            for (size_t head = first_head; head < first_head + shape_.n_each; head++) {
                const float divisor = work_.divisors[r * shape_.n_heads + head];
                const float factor = divisor == 0.0f ? 0.0f : 1.0f / divisor;
                for (size_t i = column; i < column + n_columns; i++) {
                    out(r, head)[i] *= factor;
                }
            }
        }
    }

    const ggml_tensor * op_;
    const Shape & shape_;
    const Work & work_;
    size_t stream_, first_, n_, thread_, n_threads_;
    float * converted_; // this thread's
    float scale_, cap_;
};

} // namespace

bool CpuAttention::can_compute(const ggml_tensor * op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    float alibi;
    std::memcpy(&alibi, op->op_params + 1, sizeof(float));
    return kernels::attention() != nullptr && alibi == 0.0f && mask != nullptr && mask->type == GGML_TYPE_F16 &&
           mask->ne[2] == 1 && q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 &&
           q->nb[0] == sizeof(float) && k->nb[0] == sizeof(uint16_t) && v->nb[0] == sizeof(uint16_t) && q->ne[1] > 0 &&
           k->ne[1] > 0 && k->ne[0] % 8 == 0 && v->ne[0] % 8 == 0 && q->ne[2] % k->ne[2] == 0 && k->ne[2] == v->ne[2] &&
           k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] && q->ne[3] % mask->ne[3] == 0;
}

bool CpuAttention::work_size(int n_threads, const ggml_tensor * op, size_t & size) {
    size = Work(Shape(op), static_cast<size_t>(n_threads), nullptr).size;
    return true;
}

bool CpuAttention::compute_forward(ComputeParams * params, ggml_tensor * op) {
    const Shape shape(op);
    const Work work(shape, static_cast<size_t>(params->n_threads), params->work);
    const ggml_tensor * cache = op->src[1]->view_src;
    if (params->thread == 0) {
        order.read(cache != nullptr ? cache->data : nullptr, shape.n_cells, work.order);
    }
    barrier(params->pool);
    for (size_t stream = 0; stream < shape.n_streams; stream++) {
        for (size_t first = 0; first < shape.n_rows; first += shape.n_together) {
            Rows rows(*params, op, shape, work, stream, first, std::min(shape.n_together, shape.n_rows - first));
            rows.score();
            barrier(params->pool);
            rows.weigh();
            barrier(params->pool);
            rows.add();
            barrier(params->pool);
        }
    }
    return true;
}

} // namespace pyfly
