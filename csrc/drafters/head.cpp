#include "head.h"

#include <algorithm>

#include "error.h"
#include "llama_ext.h"

namespace pyfly {

namespace {

constexpr size_t n_rows_kept = 64;   // so far back a window across rounds may break and drafting go on at once
constexpr size_t n_rows_most = 192;  // more are cut back to that
constexpr size_t n_rows_chunk = 128; // of a long batch at a time
constexpr size_t n_merged = 16;      // most entries that are evaluated together with a draft's first step

// How many tokens of `a`, which begins at position a_begin, agree with those of `b`, which begins at b_begin <=
// a_begin.
size_t n_common(const std::vector<int32_t> & a, size_t a_begin, const std::vector<int32_t> & b, size_t b_begin,
                size_t end) {
    const size_t b_end = std::min(end, b_begin + b.size());
    const size_t n = std::min(a.size(), b_end > a_begin ? b_end - a_begin : 0);
    const auto first = a.begin();
    return static_cast<size_t>(std::mismatch(first, first + static_cast<std::ptrdiff_t>(n),
                                             b.begin() + static_cast<std::ptrdiff_t>(n > 0 ? a_begin - b_begin : 0))
                                   .first -
                               first);
}

} // namespace

HeadDrafter::HeadDrafter(Parts parts, double p_min)
    : model_(std::move(parts.model)), context_(std::move(parts.context)), threads_(parts.threads), shape_(parts.shape),
      p_min_(require_p_min(p_min)), n_batch_(llama_n_batch(context_.get())), n_ubatch_(llama_n_ubatch(context_.get())),
      n_vocab_(llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context_.get())))),
      entries_begin_(shape_.first_entry) {
    llama_set_embeddings_nextn(context_.get(), true, /*masked=*/true);
}

// Forgets all entries; the next one will be `entry`.
void HeadDrafter::restart(size_t entry) {
    llama_memory_clear(llama_get_memory(context()), false);
    entries_.clear();
    entries_begin_ = entry;
}

void HeadDrafter::remove_from(size_t entry) {
    llama_memory_seq_rm(llama_get_memory(context()), 0, static_cast<llama_pos>(entry - shape_.first_entry), -1);
}

// Keeps what was seen of the first n positions.
void HeadDrafter::cut_seen(size_t n) {
    seen_.resize(n - seen_begin_);
    rows_begin_ = std::min(rows_begin_, n);
    rows_.resize((n - rows_begin_) * shape_.row_width);
}

// Keeps the first n entries.
void HeadDrafter::cut_entries(size_t n) {
    if (n < entries_.size()) {
        entries_.resize(n);
        remove_from(next_entry());
    }
}

bool HeadDrafter::has_row_before(size_t entry) const {
    return entry == 0 || (entry > rows_begin_ && entry <= seen_end());
}

void HeadDrafter::observe(const int32_t * tokens, size_t n, int32_t n_past) {
    const size_t begin = static_cast<size_t>(n_past);
    if (begin < seen_begin_ || begin > seen_end()) {
        seen_begin_ = rows_begin_ = begin;
        seen_.clear();
        rows_.clear();
        restart(std::max(shape_.first_entry, begin > 0 ? begin + 1 : 0));
    }
    cut_seen(begin);
    for (size_t i = 0; i < n; i += n_rows_chunk) {
        const size_t n_chunk = std::min(n_rows_chunk, n - i);
        seen_.insert(seen_.end(), tokens + i, tokens + i + n_chunk);
        rows_.resize(rows_.size() + n_chunk * shape_.row_width);
        read_rows(i, n_chunk, rows_.data() + rows_.size() - n_chunk * shape_.row_width);
        trim_rows();
    }
}

// Drops rows that are far back, evaluating the entries first that need them.
void HeadDrafter::trim_rows() {
    if (seen_end() - rows_begin_ <= n_rows_most) {
        return;
    }
    cut_entries(n_common(entries_, entries_begin_, seen_, seen_begin_, seen_end()));
    if (seen_end() > next_entry() + n_rows_kept) {
        catch_up(seen_, seen_begin_, seen_end());
    }
    const size_t begin = std::min(seen_end() - n_rows_kept, next_entry() - 1);
    if (begin > rows_begin_) {
        rows_.erase(rows_.begin(),
                    rows_.begin() + static_cast<std::ptrdiff_t>((begin - rows_begin_) * shape_.row_width));
        rows_begin_ = begin;
    }
}

// Forgets what does not belong to `history`. Returns whether the row is there that the draft starts from.
bool HeadDrafter::sync(const std::vector<int32_t> & history) {
    const size_t last = history.size() - 1;
    if (seen_begin_ > last) {
        return false;
    }
    cut_seen(seen_begin_ + n_common(seen_, seen_begin_, history, 0, last));
    cut_entries(n_common(entries_, entries_begin_, history, 0, last));
    return last > 0 && seen_end() == last && has_row_before(last);
}

// Collects what goes with n tokens from `entry` on.
void HeadDrafter::gather_inputs(size_t entry, size_t n) {
    inputs_.assign(n * shape_.input_width, 0.0f); // nothing comes before the first token of a text
    const size_t n_without = entry == 0 ? 1 : 0;
    if (n > n_without) {
        make_inputs(rows_.data() + (entry + n_without - 1 - rows_begin_) * shape_.row_width, n - n_without,
                    inputs_.data() + n_without * shape_.input_width);
    }
}

// Evaluates tokens[n] with the first n of inputs_, as entries from `entry` on. Rows are produced for all or none: where
// they are wanted of some tokens only, the heads' graphs answer with those of the first ones.
void HeadDrafter::evaluate(const int32_t * tokens, size_t n, size_t entry, bool with_rows) {
    try {
        decode_tokens(context(), threads_, shape_.name, tokens, n, static_cast<int32_t>(entry - shape_.first_entry),
                      with_rows ? 0 : n, inputs_.data());
    } catch (...) {
        restart(entries_begin_); // the memory may have lost more than this batch
        throw;
    }
    n_evaluated_ += static_cast<int64_t>(n);
}

// Evaluates the entries before `end`, of the tokens that begin at position `offset`, under every head.
void HeadDrafter::catch_up(const std::vector<int32_t> & tokens, size_t offset, size_t end) {
    if (!has_row_before(next_entry())) {
        restart(std::max(shape_.first_entry, rows_begin_ + 1));
    }
    while (next_entry() < end) {
        const size_t entry = next_entry();
        const size_t n = std::min(end - entry, n_batch_);
        const int32_t * first = tokens.data() + (entry - offset);
        gather_inputs(entry, n);
        for (int32_t head = 0; head < shape_.n_heads; head++) {
            if (head > 0) {
                remove_from(entry); // the next head's layer takes the same cells
            }
            select(head);
            evaluate(first, n, entry, false);
        }
        entries_.insert(entries_.end(), first, first + n);
    }
}

void HeadDrafter::draft(const std::vector<int32_t> & history, int32_t n_max, std::vector<int32_t> & out) {
    if (!sync(history)) {
        return;
    }
    const bool is_chain = shape_.n_heads > 1;
    const size_t last = history.size() - 1;
    n_max = is_chain ? std::min(n_max, shape_.n_heads) : n_max;
    if (!has_row_before(next_entry())) {
        restart(std::max(shape_.first_entry, rows_begin_ + 1));
    }
    // One head takes the last token along with what is pending; chained ones each build the draft's stretch anew.
    if (is_chain || last - next_entry() > std::min(n_merged, n_batch_ - 1)) {
        catch_up(history, 0, last);
    }
    size_t entry = next_entry(); // the first of the next batch
    std::vector<int32_t> tokens(history.begin() + static_cast<std::ptrdiff_t>(entry), history.end());
    gather_inputs(entry, tokens.size());
    while (true) {
        if (is_chain) {
            remove_from(entry);
            select(static_cast<int32_t>(out.size()));
        }
        evaluate(tokens.data(), tokens.size(), entry, true);
        const int32_t i = static_cast<int32_t>(tokens.size()) - 1;
        const float * row = llama_get_logits_ith(context(), i);
        const float * own = llama_get_embeddings_nextn_ith(context(), i);
        std::optional<int32_t> token;
        try {
            if (row == nullptr || own == nullptr) {
                throw Error(PYFLY_STATUS_INTERNAL, std::string("llama.cpp kept no row of the ") + shape_.name);
            }
            token = draft_token(row, static_cast<size_t>(n_vocab_), p_min_, shape_.name);
        } catch (...) {
            restart(entries_begin_); // its memory holds more than entries_ says
            throw;
        }
        if (!token) {
            break;
        }
        out.push_back(*token);
        if (static_cast<int32_t>(out.size()) == n_max) {
            break;
        }
        if (!is_chain) {
            entry += tokens.size();
            tokens.clear();
            inputs_.clear();
        }
        tokens.push_back(*token);
        inputs_.insert(inputs_.end(), own, own + shape_.input_width);
    }
    select(0);
    if (!is_chain) {
        entries_.insert(entries_.end(), history.begin() + static_cast<std::ptrdiff_t>(next_entry()), history.end());
    }
    remove_from(next_entry());
}

} // namespace pyfly
