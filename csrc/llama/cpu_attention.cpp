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
constexpr uint16_t exponent = 0x7C00;           // in F16: all bits of it where a number is not finite

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

// Neighbouring rows of a batch that see much the same: those of one text, as a rule.
struct Text {
    size_t first, n_rows;
    size_t n_cells; // that its rows see

    size_t n_tiles() const { return (n_cells + tile - 1) / tile; }
};

// Which cells of a tile.
enum class Sees : uint8_t { none, some, all };

// The work memory of all threads.
struct Work {
    size_t n_converted; // floats of each thread
    size_t * n_texts;   // [1]
    Text * texts;       // [n_together]: of the rows that are taken together
    float * scores;     // [n_together][n_heads][n_tiles][tile]
    float * divisors;   // [n_together][n_heads]: of each head's weights
    float * converted;  // [n_threads][n_converted]: cells as floats
    int32_t * order;    // [n_cells]: the cells, as attention takes them
    int32_t * cells;    // [n_together][n_cells]: those that a text's rows see
    Sees * sees;        // [n_together][n_tiles]: what a row sees of a tile of its text
    uint8_t * seen;     // [n_threads][n_cells]: whether the text sees a cell
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
        take(n_texts, 1);
        take(texts, shape.n_together);
        take(scores, shape.n_together * shape.n_heads * shape.n_tiles * tile);
        take(divisors, shape.n_together * shape.n_heads);
        take(converted, n_threads * n_converted);
        take(order, shape.n_cells);
        take(cells, shape.n_together * shape.n_cells);
        take(sees, shape.n_together * shape.n_tiles);
        take(seen, n_threads * shape.n_cells);
    }
};

// Rows first..first + n - 1 of a stream, step by step; all threads wait for each other behind each. The cells of texts
// that are written in the same step are neighbours: each text takes its own out of them, in their order.
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

    // Finds the texts: a row that sees what the row before it sees last is of the same. By one thread.
    void part() {
        size_t & n = *work_.n_texts = 0;
        size_t end = 0; // behind the last cell that the row before sees, in their order
        for (size_t r = 0; r < n_; r++) {
            if (end == 0 || !is_seen(r, end - 1)) {
                work_.texts[n++] = {r, 0, 0};
            }
            work_.texts[n - 1].n_rows++;
            for (end = shape_.n_cells; end > 0 && !is_seen(r, end - 1); end--) {
            }
        }
    }

    // Cells of the texts.
    void gather() {
        uint8_t * const seen = work_.seen + thread_ * shape_.n_cells;
        for (size_t i = thread_; i < *work_.n_texts; i += n_threads_) {
            Text & text = work_.texts[i];
            std::fill_n(seen, shape_.n_cells, uint8_t{0});
            for (size_t r = text.first; r < text.first + text.n_rows; r++) {
                const uint16_t * const hides = mask(r);
                for (size_t c = 0; c < shape_.n_cells; c++) {
                    seen[c] |= static_cast<uint8_t>(hides[c] != minus_infinity);
                }
            }
            int32_t * const cells = work_.cells + i * shape_.n_cells;
            for (size_t c = 0; c < shape_.n_cells; c++) {
                if (seen[work_.order[c]] != 0) {
                    cells[text.n_cells++] = work_.order[c];
                }
            }
        }
    }

    // Queries by keys.
    void score() {
        size_t task = 0;
        for (size_t i = 0; i < *work_.n_texts; i++) {
            for (size_t t = 0; t < work_.texts[i].n_tiles(); t++) {
                for (size_t group = 0; group < shape_.n_groups; group++) {
                    if (task++ % n_threads_ == thread_) {
                        score_tile(i, t, group);
                    }
                }
            }
        }
    }

    // Scores become weights, and each head gets its divisor.
    void weigh() {
        size_t task = 0;
        for (size_t i = 0; i < *work_.n_texts; i++) {
            const Text & text = work_.texts[i];
            for (size_t r = text.first; r < text.first + text.n_rows; r++) {
                for (size_t head = 0; head < shape_.n_heads; head++) {
                    if (task++ % n_threads_ == thread_) {
                        weigh_head(r, head, text.n_tiles());
                    }
                }
            }
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

    Sees & sees(size_t r, size_t t) const { return work_.sees[r * shape_.n_tiles + t]; }

    // A tile of a text's keys or values.
    struct Tile {
        const int32_t * which;
        const uint16_t * rows[tile];
        int n;

        Tile(const Rows & of, size_t text, const ggml_tensor * numbers, size_t group, size_t t, size_t column = 0)
            : which(of.work_.cells + text * of.shape_.n_cells + t * tile),
              n(static_cast<int>(std::min<size_t>(tile, of.work_.texts[text].n_cells - t * tile))) {
            for (int c = 0; c < n; c++) {
                rows[c] = at<const uint16_t>(numbers, static_cast<size_t>(which[c]), group, of.stream_) + column;
            }
        }

        kernels::Cells cells() const { return {rows, n}; }

        // Whether the first n_columns numbers of each cell are.
        bool is_finite(size_t n_columns) const {
            uint16_t any = 0;
            for (int c = 0; c < n; c++) {
                for (size_t i = 0; i < n_columns; i++) {
                    any |= static_cast<uint16_t>((rows[c][i] & exponent) == exponent);
                }
            }
            return any == 0;
        }
    };

    // What is added to the scores of a row, F16, [n_cells].
    const uint16_t * mask(size_t r) const {
        return at<const uint16_t>(op_->src[3], first_ + r, 0, stream_ % size_of(op_->src[3], 3));
    }

    // Whether a row sees the cell that is number c of all.
    bool is_seen(size_t r, size_t c) const { return mask(r)[work_.order[c]] != minus_infinity; }

    // The mask of a row and a tile.
    void read_mask(size_t r, const Tile & of, uint16_t * out) const {
        const uint16_t * row = mask(r);
        for (int c = 0; c < of.n; c++) {
            out[c] = row[of.which[c]];
        }
    }

    float * out(size_t r, size_t head) const { return at<float>(op_, head, first_ + r, stream_); }

    void score_tile(size_t i, size_t t, size_t group) {
        const Text & text = work_.texts[i];
        const Tile keys(*this, i, op_->src[1], group, t);
        const float * queries[most_queries];
        float * into[most_queries];
        size_t n_queries = 0;
        const auto flush = [&] {
            kernels::attention()->dot_products(keys.cells(), static_cast<int>(shape_.key_size), queries,
                                               static_cast<int>(n_queries), into, converted_);
            n_queries = 0;
        };
        Sees seen[most_queries];
        const size_t n_rows = text.first + text.n_rows;
        for (size_t begin = text.first; begin < n_rows; begin += most_queries) {
            const size_t end = std::min(n_rows, begin + most_queries);
            for (size_t r = begin; r < end; r++) {
                uint16_t hides[tile];
                read_mask(r, keys, hides);
                const auto n_hidden = std::count(hides, hides + keys.n, minus_infinity);
                seen[r - begin] = n_hidden == keys.n ? Sees::none : n_hidden > 0 ? Sees::some : Sees::all;
                for (size_t h = 0; seen[r - begin] != Sees::none && h < shape_.n_each; h++) {
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
                    sees(r, t) = seen[r - begin];
                }
                if (seen[r - begin] != Sees::none) {
                    finish_scores(r, t, group, keys);
                }
            }
        }
    }

    // Scale, cap and mask.
    void finish_scores(size_t r, size_t t, size_t group, const Tile & keys) const {
        const int n = keys.n;
        float bias[tile];
        std::fill(bias, bias + tile, -INFINITY);
        uint16_t halves[tile];
        read_mask(r, keys, halves);
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
            for (int c = 0; c < tile; c++) { // whatever lies in a cell that is hidden
                own[c] = bias[c] == -INFINITY ? -INFINITY : own[c] + bias[c];
            }
        }
    }

    void weigh_head(size_t r, size_t head, size_t n_tiles) {
        const kernels::Attention & kernel = *kernels::attention();
        const float * sinks = op_->src[4] != nullptr ? static_cast<const float *>(op_->src[4]->data) : nullptr;
        float most = sinks != nullptr ? sinks[head] : -INFINITY;
        for (size_t t = 0; t < n_tiles; t++) {
            most = sees(r, t) != Sees::none ? std::max(most, kernel.largest(scores(r, head, t), tile)) : most;
        }
        float sum = 0.0f;
        for (size_t t = 0; t < n_tiles; t++) {
            if (sees(r, t) != Sees::none) {
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
        for (size_t i = 0; i < *work_.n_texts; i++) {
            add_text(i, group, column, n_columns);
        }
        for (size_t r = 0; r < n_; r++) {
            for (size_t head = first_head; head < first_head + shape_.n_each; head++) {
                const float divisor = work_.divisors[r * shape_.n_heads + head];
                const float factor = divisor == 0.0f ? 0.0f : 1.0f / divisor;
                for (size_t c = column; c < column + n_columns; c++) {
                    out(r, head)[c] *= factor;
                }
            }
        }
    }

    void add_text(size_t i, size_t group, size_t column, size_t n_columns) {
        const Text & text = work_.texts[i];
        const size_t first_head = group * shape_.n_each;
        const float * weights[most_queries];
        float * into[most_queries];
        for (size_t t = 0; t < text.n_tiles(); t++) {
            const Tile values(*this, i, op_->src[2], group, t, column);
            if (is_partly_seen(text, t) && !values.is_finite(n_columns)) {
                add_seen(text, t, group, column, n_columns, values);
                continue;
            }
            size_t n_queries = 0;
            const auto flush = [&] {
                kernels::attention()->add_weighted(values.cells(), static_cast<int>(n_columns), weights,
                                                   static_cast<int>(n_queries), into, converted_);
                n_queries = 0;
            };
            for (size_t r = text.first; r < text.first + text.n_rows; r++) {
                for (size_t h = 0; sees(r, t) != Sees::none && h < shape_.n_each; h++) {
                    if (n_queries == most_queries) {
                        flush();
                    }
                    weights[n_queries] = scores(r, first_head + h, t);
                    into[n_queries++] = out(r, first_head + h) + column;
                }
            }
            flush();
        }
    }

    bool is_partly_seen(const Text & text, size_t t) const {
        for (size_t r = text.first; r < text.first + text.n_rows; r++) {
            if (sees(r, t) == Sees::some) {
                return true;
            }
        }
        return false;
    }

    // Adds a tile of values row by row, each without the cells that it does not see: a weight of 0 would make a NaN of
    // what is not finite there.
    void add_seen(const Text & text, size_t t, size_t group, size_t column, size_t n_columns, const Tile & values) {
        for (size_t r = text.first; r < text.first + text.n_rows; r++) {
            uint16_t hides[tile];
            read_mask(r, values, hides);
            for (size_t head = group * shape_.n_each; head < (group + 1) * shape_.n_each; head++) {
                const uint16_t * seen[tile];
                float weights[tile];
                int n = 0;
                for (int c = 0; c < values.n; c++) {
                    if (hides[c] != minus_infinity) {
                        seen[n] = values.rows[c];
                        weights[n++] = scores(r, head, t)[c];
                    }
                }
                const float * const own = weights;
                float * const into = out(r, head) + column;
                kernels::attention()->add_weighted({seen, n}, static_cast<int>(n_columns), &own, 1, &into, converted_);
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
        order.read(cache != nullptr ? cache->buffer : nullptr, shape.n_cells, work.order);
    }
    for (size_t stream = 0; stream < shape.n_streams; stream++) {
        for (size_t first = 0; first < shape.n_rows; first += shape.n_together) {
            Rows rows(*params, op, shape, work, stream, first, std::min(shape.n_together, shape.n_rows - first));
            if (params->thread == 0) {
                rows.part();
            }
            barrier(params->pool);
            rows.gather();
            barrier(params->pool);
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
