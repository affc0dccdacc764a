#include "cpu_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/attention.h"

namespace pyfly {

namespace {

using ggml_internal::ComputeParams;
using kernels::CellType;
using kernels::tile;

constexpr size_t all_scores = size_t{1} << 24;   // floats of as many tasks as there are threads
constexpr size_t least_scores = size_t{1} << 20; // of a task, nevertheless
constexpr size_t most_scores = size_t{1} << 22;
constexpr size_t most_rows = 32;                  // of a task
constexpr size_t most_cut = size_t{1} << 23;      // floats of tasks that all threads work at
constexpr size_t most_marks = size_t{1} << 20;    // of all texts together: whether one sees a cell
constexpr size_t worth_sharing = size_t{1} << 16; // numbers of masks: fewer are read by one thread
constexpr size_t least_columns = 16;              // of values that a thread adds
constexpr size_t line = 64;                       // bytes of a cache line: where parts of the work memory begin
constexpr uint16_t minus_infinity = 0xFC00;       // in F16

size_t size_of(const ggml_tensor * tensor, int dimension) {
    return static_cast<size_t>(tensor->ne[dimension]);
}

template <class T> T * at(const ggml_tensor * tensor, size_t i1, size_t i2, size_t i3) {
    return reinterpret_cast<T *>(static_cast<char *>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] +
                                 i3 * tensor->nb[3]);
}

// Of a tensor for which are_cells() holds.
CellType cell_type(const ggml_tensor * tensor) {
    switch (tensor->type) {
        case GGML_TYPE_BF16:
            return CellType::bf16;
        case GGML_TYPE_Q8_0:
            return CellType::q8_0;
        case GGML_TYPE_Q4_0:
            return CellType::q4_0;
        default:
            return CellType::f16;
    }
}

// The sizes of an operation: q[key_size, n_rows, n_heads, n_streams], k[key_size, n_cells, n_groups, n_streams],
// v[value_size, n_cells, n_groups, n_streams], mask[n_cells, n_rows, 1, 1 or n_streams], sinks[n_heads] or none, and
// out[value_size, n_heads, n_rows, n_streams]. A group is the heads that share keys and values.
struct Shape {
    size_t key_size, value_size, n_rows, n_heads, n_streams, n_groups, n_each, n_cells, n_tiles;
    size_t n_texts; // that are taken together at most
    size_t n_block; // rows of a task at most

    Shape(const ggml_tensor * op, size_t n_threads)
        : key_size(size_of(op->src[1], 0)), value_size(size_of(op->src[2], 0)), n_rows(size_of(op->src[0], 1)),
          n_heads(size_of(op->src[0], 2)), n_streams(size_of(op->src[0], 3)), n_groups(size_of(op->src[1], 2)),
          n_each(n_heads / n_groups), n_cells(size_of(op->src[1], 1)), n_tiles((n_cells + tile - 1) / tile),
          n_texts(std::clamp<size_t>(most_marks / n_cells, 1, n_rows)),
          n_block(std::clamp<size_t>(std::clamp(all_scores / n_threads, least_scores, most_scores) /
                                         (n_each * n_tiles * tile),
                                     1, std::min(n_rows, most_rows))) {}

    size_t n_queries() const { return n_block * n_each; } // of a task at most
};

// Neighbouring rows of a batch that see much the same: those of one request, as a rule.
struct Text {
    size_t first, n_rows;
    size_t n_cells; // that its rows see

    size_t n_tiles() const { return (n_cells + tile - 1) / tile; }
};

// Some rows of a text.
struct Block {
    size_t text, first, n_rows;
};

// Which cells of a tile.
enum class Sees : uint8_t { none, some, all };

// The work memory of all threads. A task of n queries has n neighbouring places in it.
struct Work {
    size_t n_threads, n_places;
    size_t * n_texts;      // [1]
    size_t * n_blocks;     // [1]
    Text * texts;          // [n_texts]
    Block * blocks;        // [n_rows]
    const float ** inputs; // [n_threads][n_queries]
    float ** outputs;      // [n_threads][n_queries]
    int64_t * sums;        // [n_places][n_threads]: of weights
    float * most;          // [n_places][n_threads]: the largest scores
    float * largest;       // [n_threads][n_queries]: of all parts of a task
    float * scores;        // [n_places][n_tiles][tile], then weights
    float * converted;     // [n_threads][tile][key_size or value_size]: cells as floats
    int32_t * order;       // [n_cells]: the cells, as attention takes them
    int32_t * cells;       // [n_texts][n_cells]: those that a text's rows see
    Sees * sees;           // [n_places / n_each][n_tiles]: what a row sees of a tile of its text
    uint8_t * seen;        // [n_texts][n_cells]: whether a text sees a cell
    size_t size;           // bytes

    // At `memory`; null where only the size is asked for.
    Work(const Shape & shape, size_t of_threads, void * memory)
        : n_threads(of_threads), n_places(std::max((2 * n_threads - 1) * shape.n_queries(),
                                                   std::min(std::min(shape.n_rows, most_rows) * shape.n_heads,
                                                            most_cut / (shape.n_tiles * tile)))) {
        const size_t unused = (line - reinterpret_cast<uintptr_t>(memory) % line) % line;
        char * const begin = static_cast<char *>(memory) + unused;
        size = 0;
        const auto take = [&](auto *& part, size_t n) {
            using Number = std::remove_reference_t<decltype(*part)>;
            part = memory != nullptr ? reinterpret_cast<Number *>(begin + size) : nullptr;
            size += (n * sizeof(Number) + line - 1) / line * line;
        };
        take(n_texts, 1);
        take(n_blocks, 1);
        take(texts, shape.n_texts);
        take(blocks, shape.n_rows);
        take(inputs, n_threads * shape.n_queries());
        take(outputs, n_threads * shape.n_queries());
        take(sums, n_places * n_threads);
        take(most, n_places * n_threads);
        take(largest, n_threads * shape.n_queries());
        take(scores, n_places * shape.n_tiles * tile);
        take(converted, n_threads * tile * std::max(shape.key_size, shape.value_size));
        take(order, shape.n_cells);
        take(cells, shape.n_texts * shape.n_cells);
        take(sees, n_places / shape.n_each * shape.n_tiles);
        take(seen, shape.n_texts * shape.n_cells);
        size += line; // `memory` may begin anywhere
    }
};

// What all threads know of an operation and one of its streams.
struct Operation {
    const ggml_tensor * op;
    const Shape & shape;
    const Work & work;
    size_t stream, thread;
    float scale, cap, most_bias;

    Operation(const ggml_tensor * of, const Shape & of_shape, const Work & of_work, size_t of_stream, int of_thread)
        : op(of), shape(of_shape), work(of_work), stream(of_stream), thread(static_cast<size_t>(of_thread)) {
        std::memcpy(&scale, op->op_params, sizeof(float));
        std::memcpy(&most_bias, op->op_params + 1, sizeof(float));
        std::memcpy(&cap, op->op_params + 2, sizeof(float));
        scale /= cap != 0.0f ? cap : 1.0f;
    }

    // What is added to the scores of a row, F16, [n_cells].
    const uint16_t * mask(size_t row) const {
        return at<const uint16_t>(op->src[3], row, 0, stream % size_of(op->src[3], 3));
    }

    // What a head multiplies its masks by: of ALiBi (arXiv:2108.12409), with a mask of distances, what section 3 says;
    // heads beyond a power of two take every second slope of twice as many.
    float slope(size_t head) const {
        if (most_bias <= 0.0f) {
            return 1.0f;
        }
        size_t n = 1;
        while (2 * n <= shape.n_heads) {
            n *= 2;
        }
        const size_t number = head < n ? 2 * (head + 1) : 2 * (head - n) + 1;
        return std::exp2(-most_bias * static_cast<float>(number) / static_cast<float>(2 * n));
    }
};

// ---- Who sees what --------------------------------------------------------------------------------------------------

// The texts of rows, and which cells they see. The cells of texts that are written in the same step are neighbours:
// each text takes its own out of them, in their order.
class Texts {
  public:
    explicit Texts(const Operation & of) : of_(of), work_(of.work) {}

    // Finds as many texts as are taken together, from a row on: a row that sees what the row before it sees last is of
    // the same. Cuts them into blocks. By one thread.
    void part(size_t first) const {
        const Shape & shape = of_.shape;
        size_t & n = *work_.n_texts = 0;
        size_t & n_blocks = *work_.n_blocks = 0;
        size_t end = 0; // behind the last cell that the row before sees, in their order
        for (size_t row = first; row < shape.n_rows; row++) {
            if (end == 0 || !is_seen(row, end - 1)) {
                if (n == shape.n_texts) {
                    break;
                }
                work_.texts[n++] = {row, 0, 0};
            }
            if (work_.texts[n - 1].n_rows++ % shape.n_block == 0) {
                work_.blocks[n_blocks++] = {n - 1, row, 0};
            }
            work_.blocks[n_blocks - 1].n_rows++;
            for (end = shape.n_cells; end > 0 && !is_seen(row, end - 1); end--) {
            }
        }
    }

    // The first row behind the texts.
    size_t end() const {
        const Text & last = work_.texts[*work_.n_texts - 1];
        return last.first + last.n_rows;
    }

    // Marks what the texts see of cells begin..end - 1.
    void mark(size_t begin, size_t end) const {
        for (size_t i = 0; i < *work_.n_texts; i++) {
            const Text & text = work_.texts[i];
            uint8_t * const seen = work_.seen + i * of_.shape.n_cells;
            std::fill(seen + begin, seen + end, uint8_t{0});
            for (size_t row = text.first; row < text.first + text.n_rows; row++) {
                const uint16_t * const hides = of_.mask(row);
                for (size_t c = begin; c < end; c++) {
                    seen[c] |= static_cast<uint8_t>(hides[c] != minus_infinity);
                }
            }
        }
    }

    // Lists the cells of a text, in their order.
    void list(size_t i) const {
        const uint8_t * const seen = work_.seen + i * of_.shape.n_cells;
        int32_t * const cells = work_.cells + i * of_.shape.n_cells;
        size_t n = 0;
        for (size_t c = 0; c < of_.shape.n_cells; c++) {
            cells[n] = work_.order[c];
            n += seen[work_.order[c]];
        }
        work_.texts[i].n_cells = n;
    }

  private:
    // Whether a row sees the cell that is number c of all.
    bool is_seen(size_t row, size_t c) const { return of_.mask(row)[work_.order[c]] != minus_infinity; }

    const Operation & of_;
    const Work & work_;
};

// ---- Tasks ----------------------------------------------------------------------------------------------------------

// The rows of a block with the heads of a group: queries, numbered row by row. The tiles are scored, and once all are,
// weighed and added. A task may be cut into parts, each of some tiles: the largest scores and the sums of weights are
// those of all parts.
class Task {
  public:
    // `place`: the first of its places.
    Task(const Operation & of, const Block & block, size_t group, size_t place)
        : of_(of), shape_(of.shape), block_(block), text_(of.work.texts[block.text]), group_(group),
          n_queries_(block.n_rows * shape_.n_each), most_(of.work.most + place * of.work.n_threads),
          sums_(of.work.sums + place * of.work.n_threads), scores_(of.work.scores + place * shape_.n_tiles * tile),
          sees_(of.work.sees + place / shape_.n_each * shape_.n_tiles),
          inputs_(of.work.inputs + of.thread * shape_.n_queries()),
          outputs_(of.work.outputs + of.thread * shape_.n_queries()),
          largest_(of.work.largest + of.thread * shape_.n_queries()),
          converted_(of.work.converted + of.thread * tile * std::max(shape_.key_size, shape_.value_size)) {}

    size_t n_tiles() const { return text_.n_tiles(); }

    void begin(size_t part) const {
        std::fill_n(most_ + part * n_queries_, n_queries_, -INFINITY);
        std::fill_n(sums_ + part * n_queries_, n_queries_, int64_t{0});
    }

    // Queries by the keys of a tile, and the largest score of each.
    void score(size_t t, size_t part) const {
        const Tile keys(*this, of_.op->src[1], t);
        float biases[most_rows][tile];
        size_t n = 0;
        for (size_t r = 0; r < block_.n_rows; r++) {
            const Sees seen = sees_of(r, t) = read_mask(block_.first + r, keys, biases[r]);
            for (size_t q = r * shape_.n_each; seen != Sees::none && q < (r + 1) * shape_.n_each; q++) {
                inputs_[n] = at<const float>(of_.op->src[0], row(q), head(q), of_.stream);
                outputs_[n++] = scores(q, t);
            }
        }
        kernels::attention()->dot_products(keys.cells(), static_cast<int>(shape_.key_size), inputs_,
                                           static_cast<int>(n), outputs_, converted_);
        float * const most = most_ + part * n_queries_;
        for (size_t q = 0; q < n_queries_; q++) {
            if (sees(q, t) != Sees::none) {
                float sloped[tile];
                most[q] =
                    std::max(most[q], kernels::attention()->finish(scores(q, t), of_.scale, of_.cap,
                                                                   bias_of(q, biases[q / shape_.n_each], sloped)));
            }
        }
    }

    // Scores of tiles begin..end - 1, some of a part of n_parts, become weights.
    void weigh(size_t begin, size_t end, size_t part, size_t n_parts) const {
        for (size_t q = 0; q < n_queries_; q++) {
            largest_[q] = largest(q, n_parts);
        }
        for (size_t t = begin; t < end; t++) {
            for (size_t q = 0; q < n_queries_; q++) {
                if (sees(q, t) != Sees::none) {
                    sums_[part * n_queries_ + q] += kernels::attention()->exponentials(scores(q, t), largest_[q]);
                }
            }
        }
    }

    void begin_out(size_t column, size_t n_columns) const {
        for (size_t q = 0; q < n_queries_; q++) {
            std::fill_n(out(q) + column, n_columns, 0.0f);
        }
    }

    // Adds columns of a tile of weighted values.
    void add(size_t t, size_t column, size_t n_columns) const {
        const Tile values(*this, of_.op->src[2], t, column);
        if (is_partly_seen(t) && !is_finite(values, n_columns)) {
            return add_seen(t, column, n_columns, values);
        }
        size_t n = 0;
        for (size_t q = 0; q < n_queries_; q++) {
            if (sees(q, t) != Sees::none) {
                inputs_[n] = scores(q, t);
                outputs_[n++] = out(q) + column;
            }
        }
        kernels::attention()->add_weighted(values.cells(), static_cast<int>(n_columns), inputs_, static_cast<int>(n),
                                           outputs_, converted_);
    }

    // Divides what is added by the weights, and by that of the sink.
    void divide(size_t n_parts, size_t column, size_t n_columns) const {
        for (size_t q = 0; q < n_queries_; q++) {
            int64_t sum = 0;
            for (size_t part = 0; part < n_parts; part++) {
                sum += sums_[part * n_queries_ + q];
            }
            const float divisor = static_cast<float>(static_cast<double>(sum) / kernels::weight_unit) +
                                  std::exp(sink(q) - largest(q, n_parts));
            const float factor = divisor > 0.0f ? 1.0f / divisor : 0.0f;
            float * const own = out(q) + column;
            for (size_t c = 0; c < n_columns; c++) {
                own[c] *= factor;
            }
        }
    }

  private:
    // A tile of the text's keys or values, from a column on.
    struct Tile {
        const int32_t * which;
        const void * rows[tile];
        int n;
        bool is_run = true; // whether each cell is followed by its neighbour
        CellType type;

        Tile(const Task & of, const ggml_tensor * numbers, size_t t, size_t column = 0)
            : which(of.of_.work.cells + of.block_.text * of.shape_.n_cells + t * tile),
              n(static_cast<int>(std::min<size_t>(tile, of.text_.n_cells - t * tile))), type(cell_type(numbers)) {
            const size_t offset = ggml_row_size(numbers->type, static_cast<int64_t>(column));
            for (int c = 0; c < n; c++) {
                rows[c] = at<const char>(numbers, static_cast<size_t>(which[c]), of.group_, of.of_.stream) + offset;
                is_run &= which[c] == which[0] + c;
            }
        }

        kernels::Cells cells() const { return {rows, n, type}; }
    };

    size_t row(size_t q) const { return block_.first + q / shape_.n_each; }
    size_t head(size_t q) const { return group_ * shape_.n_each + q % shape_.n_each; }
    float * out(size_t q) const { return at<float>(of_.op, head(q), row(q), of_.stream); }

    // What a query scores against nothing; -infinity without sinks.
    float sink(size_t q) const {
        const ggml_tensor * sinks = of_.op->src[4];
        return sinks != nullptr ? static_cast<const float *>(sinks->data)[head(q)] : -INFINITY;
    }

    // Of a query's scores.
    float largest(size_t q, size_t n_parts) const {
        float most = sink(q);
        for (size_t part = 0; part < n_parts; part++) {
            most = std::max(most, most_[part * n_queries_ + q]);
        }
        return most;
    }

    float * scores(size_t q, size_t t) const { return scores_ + (t * n_queries_ + q) * tile; }
    Sees & sees_of(size_t r, size_t t) const { return sees_[t * block_.n_rows + r]; }
    Sees sees(size_t q, size_t t) const { return sees_of(q / shape_.n_each, t); }

    // What is added to the scores of a row and a tile; hidden behind its end. Returns which cells the row sees.
    Sees read_mask(size_t row, const Tile & of, float * bias) const {
        const uint16_t * hides = of_.mask(row);
        uint16_t halves[tile];
        if (of.is_run) {
            std::memcpy(halves, hides + of.which[0], static_cast<size_t>(of.n) * sizeof(uint16_t));
        } else {
            for (int c = 0; c < of.n; c++) {
                halves[c] = hides[of.which[c]];
            }
        }
        int n_hidden = 0;
        uint16_t any = 0;
        for (int c = 0; c < of.n; c++) {
            n_hidden += halves[c] == minus_infinity ? 1 : 0;
            any |= halves[c];
        }
        if (n_hidden == of.n) {
            return Sees::none;
        }
        std::fill(bias, bias + tile, any == 0 ? 0.0f : -INFINITY);
        std::fill(bias + of.n, bias + tile, -INFINITY);
        if (any != 0) {
            ggml_fp16_to_fp32_row(halves, bias, of.n);
        }
        return n_hidden > 0 ? Sees::some : Sees::all;
    }

    // What a query adds to its scores, given what its row does; `room` is [tile].
    const float * bias_of(size_t q, const float * of_row, float * room) const {
        const float slope = of_.slope(head(q));
        if (slope == 1.0f) {
            return of_row;
        }
        for (int c = 0; c < tile; c++) {
            room[c] = slope * of_row[c];
        }
        return room;
    }

    bool is_partly_seen(size_t t) const {
        for (size_t r = 0; r < block_.n_rows; r++) {
            if (sees_of(r, t) == Sees::some) {
                return true;
            }
        }
        return false;
    }

    // Whether the first n_columns numbers of each cell are.
    bool is_finite(const Tile & of, size_t n_columns) const {
        bool is = true;
        for (int c = 0; c < of.n; c++) {
            kernels::attention()->convert(of.type, of.rows[c], static_cast<int>(n_columns), converted_);
            for (size_t i = 0; i < n_columns; i++) {
                is &= std::abs(converted_[i]) < INFINITY;
            }
        }
        return is;
    }

    // Adds a tile of values row by row, each without the cells that it does not see: a weight of 0 would make a NaN of
    // what is not finite there.
    void add_seen(size_t t, size_t column, size_t n_columns, const Tile & values) const {
        for (size_t q = 0; q < n_queries_; q++) {
            const uint16_t * const hides = of_.mask(row(q));
            const void * seen[tile];
            float weights[tile];
            int n = 0;
            for (int c = 0; c < values.n; c++) {
                if (hides[values.which[c]] != minus_infinity) {
                    seen[n] = values.rows[c];
                    weights[n++] = scores(q, t)[c];
                }
            }
            const float * const own = weights;
            float * const into = out(q) + column;
            if (n > 0) {
                kernels::attention()->add_weighted({seen, n, values.type}, static_cast<int>(n_columns), &own, 1, &into,
                                                   converted_);
            }
        }
    }

    const Operation & of_;
    const Shape & shape_;
    const Block block_;
    const Text & text_;
    size_t group_, n_queries_;
    float * most_;          // [n_parts][n_queries]
    int64_t * sums_;        // [n_parts][n_queries]
    float * scores_;        // [n_tiles][n_queries][tile]
    Sees * sees_;           // [n_tiles][n_rows]
    const float ** inputs_; // this thread's
    float ** outputs_;
    float * largest_;
    float * converted_;
};

// ---- All threads ----------------------------------------------------------------------------------------------------

// Finds the texts from a row on.
void find_texts(const CpuAttention & library, const ComputeParams & params, const Operation & of, size_t first) {
    const Texts texts(of);
    const size_t n_cells = of.shape.n_cells;
    const size_t n_readers = (of.shape.n_rows - first) * n_cells < worth_sharing ? 1 : of.work.n_threads; // of masks
    const auto wait = [&] {
        if (n_readers > 1) {
            library.barrier(params.pool);
        }
    };
    if (of.thread == 0) {
        texts.part(first);
        library.set_chunk(params.pool, params.n_threads);
    }
    wait();
    if (of.thread < n_readers) {
        texts.mark(n_cells * of.thread / n_readers, n_cells * (of.thread + 1) / n_readers);
    }
    wait();
    for (size_t i = of.thread; of.thread < n_readers && i < *of.work.n_texts; i += n_readers) {
        texts.list(i);
    }
    library.barrier(params.pool);
}

// A task for each thread, and then whatever is left.
void compute_tasks(const CpuAttention & library, const ComputeParams & params, const Operation & of) {
    const size_t n_blocks = *of.work.n_blocks, n_columns = of.shape.value_size;
    for (size_t i = of.thread; i < n_blocks * of.shape.n_groups;
         i = static_cast<size_t>(library.add_chunk(params.pool, 1))) {
        // Threads that are at the same group read the same cells; the last blocks see most of them.
        const Block & block = of.work.blocks[n_blocks - 1 - i % n_blocks];
        const Task task(of, block, i / n_blocks, of.thread * of.shape.n_queries());
        task.begin(0);
        for (size_t t = 0; t < task.n_tiles(); t++) {
            task.score(t, 0);
        }
        task.begin_out(0, n_columns);
        for (size_t t = 0; t < task.n_tiles(); t++) {
            task.weigh(t, t + 1, 0, 1);
            task.add(t, 0, n_columns);
        }
        task.divide(1, 0, n_columns);
    }
}

// Every thread does a part of each task: some tiles of the keys, then some columns of the values. The groups of a block
// take turns at a tile, since their cells are neighbours.
class Parts {
  public:
    explicit Parts(const Operation & of)
        : of_(of), n_groups_(of.shape.n_groups), n_threads_(of.work.n_threads), size_(of.shape.value_size),
          step_(std::max(least_columns, static_cast<size_t>(ggml_blck_size(of.op->src[2]->type)))),
          n_steps_((size_ + step_ - 1) / step_) {}

    void score() const {
        for_each_block([&](const Block & block) {
            for (size_t group = 0; group < n_groups_; group++) {
                task(block, group).begin(of_.thread);
            }
            for (size_t t = begin(block, of_.thread); t < begin(block, of_.thread + 1); t++) {
                for (size_t group = 0; group < n_groups_; group++) {
                    task(block, group).score(t, of_.thread);
                }
            }
        });
    }

    void weigh() const {
        for_each_block([&](const Block & block) {
            for (size_t group = 0; group < n_groups_; group++) {
                task(block, group)
                    .weigh(begin(block, of_.thread), begin(block, of_.thread + 1), of_.thread, n_threads_);
            }
        });
    }

    // Columns are cut among the threads, or groups are where these are many.
    void add() const {
        const size_t n_parts = n_groups_ % n_threads_ == 0 ? 1 : std::min(n_threads_, n_steps_);
        const auto column = [&](size_t part) { return std::min(size_, n_steps_ * part / n_parts * step_); };
        for_each_block([&](const Block & block) {
            const auto for_each_own = [&](auto what) {
                for (size_t i = of_.thread; i < n_groups_ * n_parts; i += n_threads_) {
                    const size_t first = column(i % n_parts);
                    what(task(block, i / n_parts), first, column(i % n_parts + 1) - first);
                }
            };
            for_each_own([](const Task & own, size_t first, size_t n) { own.begin_out(first, n); });
            for (size_t t = 0; t < of_.work.texts[block.text].n_tiles(); t++) {
                for_each_own([&](const Task & own, size_t first, size_t n) { own.add(t, first, n); });
            }
            for_each_own([&](const Task & own, size_t first, size_t n) { own.divide(n_threads_, first, n); });
        });
    }

  private:
    template <class What> void for_each_block(What what) const {
        for (size_t i = 0; i < *of_.work.n_blocks; i++) {
            what(of_.work.blocks[i]);
        }
    }

    Task task(const Block & block, size_t group) const {
        const size_t n_before = (block.first - of_.work.blocks[0].first) * of_.shape.n_heads;
        return Task(of_, block, group, n_before + group * block.n_rows * of_.shape.n_each);
    }

    // The first tile of a thread.
    size_t begin(const Block & block, size_t thread) const {
        return of_.work.texts[block.text].n_tiles() * thread / n_threads_;
    }

    const Operation & of_;
    size_t n_groups_, n_threads_;
    size_t size_, step_, n_steps_; // numbers of a value: of a step's columns
};

// Whether all threads work at the same task: with few rows, whose cells are then read in the order in which they lie,
// or where few tasks would leave threads idle.
bool are_cut(const Operation & of, size_t n_rows) {
    const Shape & shape = of.shape;
    const size_t n_tasks = *of.work.n_blocks * shape.n_groups;
    return (n_rows <= most_rows && n_rows * shape.n_heads * shape.n_tiles * tile <= most_cut) ||
           (n_tasks % of.work.n_threads != 0 && n_tasks < 2 * of.work.n_threads);
}

} // namespace

bool CpuAttention::can_compute(const ggml_tensor * op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    const auto can_read = [](const ggml_tensor * of) {
        return are_cells(of->type) && of->nb[0] == ggml_type_size(of->type) && of->ne[0] % 8 == 0 &&
               of->ne[0] % ggml_blck_size(of->type) == 0;
    };
    return kernels::attention() != nullptr && mask != nullptr && mask->type == GGML_TYPE_F16 && mask->ne[2] == 1 &&
           q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && can_read(k) && can_read(v) && q->ne[1] > 0 &&
           k->ne[1] > 0 && q->ne[2] % k->ne[2] == 0 && k->ne[2] == v->ne[2] && k->ne[3] == q->ne[3] &&
           v->ne[3] == q->ne[3] && q->ne[3] % mask->ne[3] == 0;
}

bool CpuAttention::work_size(int n_threads, const ggml_tensor * op, size_t & size) {
    // OpenMP may have fewer threads when it computes (OMP_THREAD_LIMIT), and fewer may need more: their tasks are
    // larger.
    size = 0;
    for (size_t n = 1; n <= static_cast<size_t>(n_threads); n++) {
        size = std::max(size, Work(Shape(op, n), n, nullptr).size);
    }
    return true;
}

bool CpuAttention::compute_forward(ComputeParams * params, ggml_tensor * op) {
    const size_t thread = static_cast<size_t>(params->thread), n_threads = static_cast<size_t>(params->n_threads);
    const Shape shape(op, n_threads);
    const Work work(shape, n_threads, params->work);
    const ggml_tensor * cache = op->src[1]->view_src;
    if (thread == 0) {
        order.read(cache != nullptr ? cache->buffer : nullptr, shape.n_cells, work.order);
    }
    for (size_t stream = 0; stream < shape.n_streams; stream++) {
        const Operation operation(op, shape, work, stream, params->thread);
        for (size_t first = 0, end = 0; first < shape.n_rows; first = end) {
            if (stream + first > 0) {
                barrier(params->pool); // everyone is done with the work memory
            }
            find_texts(*this, *params, operation, first);
            end = Texts(operation).end();
            if (are_cut(operation, end - first)) {
                const Parts parts(operation);
                parts.score();
                barrier(params->pool);
                parts.weigh();
                barrier(params->pool);
                parts.add();
            } else {
                compute_tasks(*this, *params, operation);
            }
        }
    }
    return true;
}

} // namespace pyfly
