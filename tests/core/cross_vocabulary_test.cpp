// Two made-up vocabularies and a drafter that knows how each text goes on: histories stay aligned, and whatever is
// proposed is how the text goes on, from the middle of characters too.

#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <unordered_map>

#include "drafters/cross_vocabulary.h"
#include "utf8.h"

namespace {

using pyfly::CrossVocabulary;
using pyfly::DraftRequest;
using pyfly::Proposal;
using pyfly::Tokenizer;

std::mt19937 random_number(7);

size_t below(size_t n) {
    return random_number() % n;
}

std::string utf8(uint32_t c) {
    if (c < 0x80) {
        return {static_cast<char>(c)};
    }
    std::string out;
    for (int shift = c < 0x800 ? 6 : c < 0x10000 ? 12 : 18; shift >= 0; shift -= 6) {
        const unsigned lead = shift == 6 && c < 0x800 ? 0xC0 : shift == 12 && c < 0x10000 ? 0xE0 : 0xF0;
        out.push_back(static_cast<char>((out.empty() ? lead : 0x80) | ((c >> shift) & 0x3F)));
    }
    return out;
}

std::string random_text() {
    static const uint32_t blocks[][2] = {{0x20, 0x7E},     {0x61, 0x7A},     {0x61, 0x63},       {0x20, 0x20},
                                         {0x9, 0xA},       {0xC0, 0x24F},    {0x300, 0x36F},     {0x5D0, 0x64A},
                                         {0x4E00, 0x4E10}, {0x4E00, 0x9FFF}, {0x1F600, 0x1F64F}, {0x0, 0xD7FF},
                                         {0x200D, 0x200D}, {0xE000, 0xFFFF}, {0x10000, 0x10FFFF}};
    std::string text;
    const size_t n = below(40), block = below(std::size(blocks) + 1);
    for (size_t i = 0; i < n; i++) {
        const auto & range = blocks[block < std::size(blocks) && below(4) > 0 ? block : below(std::size(blocks))];
        text += utf8(range[0] + static_cast<uint32_t>(below(range[1] - range[0] + 1)));
    }
    return text;
}

// Bytes, and longer pieces out of random texts, whole characters or not. The longest that fits is taken.
class Pieces : public Tokenizer {
  public:
    Pieces(size_t n_pieces, bool has_begin) : has_begin_(has_begin) {
        for (int byte = 0; byte < 256; byte++) {
            add({static_cast<char>(byte)}, "");
        }
        while (pieces_.size() < n_pieces) {
            const std::string text = random_text();
            if (text.size() > 2) {
                const std::string piece = text.substr(below(text.size() - 1), 2 + below(longest - 1));
                if (by_piece_.count(piece) == 0) {
                    add(piece, "");
                }
            }
        }
        begin_ = n();
        add("", "<begin>");
        end_ = n();
        add("", has_begin ? "<end>" : "<|eot|>"); // they end a turn, under different names
        add("", "<both>");
        add("", has_begin ? "<one>" : "<other>");
    }

    int32_t n() const override { return static_cast<int32_t>(pieces_.size()); }
    const std::string & piece(int32_t token) const override { return pieces_[static_cast<size_t>(token)]; }
    const std::string & control(int32_t token) const override { return controls_[static_cast<size_t>(token)]; }
    int32_t begin() const override { return has_begin_ ? begin_ : -1; }
    int32_t end() const override { return end_; }
    bool is_end(int32_t token) const override { return token == end_; }

    std::vector<int32_t> tokenize(const std::string & text) const override {
        std::vector<int32_t> out;
        for (size_t at = 0; at < text.size();) {
            size_t n = std::min(longest, text.size() - at);
            while (by_piece_.count(text.substr(at, n)) == 0) {
                n--;
            }
            out.push_back(by_piece_.at(text.substr(at, n)));
            at += n;
        }
        return out;
    }

    std::string bytes(const std::vector<int32_t> & tokens) const {
        std::string out;
        for (const int32_t token : tokens) {
            out += piece(token);
        }
        return out;
    }

  private:
    void add(const std::string & piece, const std::string & control) {
        by_piece_.emplace(piece, n());
        pieces_.push_back(piece);
        controls_.push_back(control);
    }

    static constexpr size_t longest = 7;

    bool has_begin_;
    std::vector<std::string> pieces_, controls_;
    std::unordered_map<std::string, int32_t> by_piece_;
    int32_t begin_ = -1, end_ = -1;
};

// Goes on with a text, and ends it.
class Knowing : public pyfly::Drafter {
  public:
    explicit Knowing(const Pieces & pieces) : pieces_(pieces) {}

    void propose(const std::vector<DraftRequest> & requests) override {
        for (const DraftRequest & request : requests) {
            assert(!request.history->empty() && request.n_max >= 1 && request.out->tokens.empty());
            const std::string said = pieces_.bytes(*request.history);
            assert(text.compare(0, said.size(), said) == 0);
            std::vector<int32_t> & out = request.out->tokens;
            out = pieces_.tokenize(text.substr(said.size()));
            out.push_back(pieces_.end());
            out.resize(std::min(out.size(), static_cast<size_t>(request.n_max)));
            auto step = pyfly::DraftStep::goes_on;
            for (size_t i = 0; i < out.size() && request.stop && step == pyfly::DraftStep::goes_on; i++) {
                request.out->confidence.push_back(0.5f);
                step = request.stop(0.5);
                if (step == pyfly::DraftStep::ends_before) {
                    request.out->dropped = out[i];
                }
                if (step != pyfly::DraftStep::goes_on) {
                    out.resize(i + (step == pyfly::DraftStep::ends_behind ? 1 : 0));
                }
            }
        }
    }

    std::string text;

  private:
    const Pieces & pieces_;
};

std::string whole(const std::string & bytes) {
    std::string text, tail;
    pyfly::append_utf8(text, tail, bytes);
    return text;
}

struct World {
    Pieces * target;
    Pieces * draft;
    Knowing * inner;
    CrossVocabulary cross;
};

World make_world(size_t n_target, size_t n_draft, bool has_begin) {
    auto target = std::make_unique<Pieces>(n_target, !has_begin);
    auto draft = std::make_unique<Pieces>(n_draft, has_begin);
    auto inner = std::make_unique<Knowing>(*draft);
    Pieces *t = target.get(), *d = draft.get();
    Knowing * k = inner.get();
    return {t, d, k, CrossVocabulary(std::move(target), std::move(draft), std::move(inner))};
}

// Of the target's tokens, in pieces of the text that were tokenised one by one, characters cut in two among them.
std::vector<int32_t> cut_up(const Pieces & pieces, const std::string & text) {
    std::vector<int32_t> tokens;
    for (size_t at = 0; at < text.size();) {
        const size_t n = 1 + below(below(2) == 0 ? 3 : text.size());
        const std::vector<int32_t> more = pieces.tokenize(text.substr(at, n));
        tokens.insert(tokens.end(), more.begin(), more.end());
        at += n;
    }
    return tokens;
}

void test_texts_that_grow_and_are_taken_back(World & world, int n) {
    size_t n_proposed = 0, n_asked = 0;
    for (int i = 0; i < n; i++) {
        const std::string text = random_text();
        world.inner->text = text;
        const std::vector<int32_t> tokens = cut_up(*world.target, text);
        std::vector<int32_t> history;
        for (int step = 0; step < 3; step++) {
            const auto n_said = static_cast<std::ptrdiff_t>(below(tokens.size() + 1)); // more than before, or less
            history.assign(tokens.begin(), tokens.begin() + n_said);
            const std::string said = world.target->bytes(history);
            assert(world.draft->bytes(world.cross.translate(0, history)) == whole(said));
            if (history.empty()) {
                continue;
            }
            Proposal proposal;
            const int32_t k = static_cast<int32_t>(1 + below(8));
            world.cross.propose({{0, &history, k, &proposal}});
            const std::vector<int32_t> & made = proposal.tokens;
            assert(made.size() <= static_cast<size_t>(k) && proposal.rows.empty());
            const std::string then = said + world.target->bytes(made);
            assert(text.compare(0, then.size(), then) == 0);
            const bool has_end = std::count(made.begin(), made.end(), world.target->end()) > 0;
            assert(!has_end || (made.back() == world.target->end() && then == text));
            const bool is_empty = world.cross.translate(0, history).empty();
            assert(is_empty || k < 4 || !made.empty());
            n_proposed += made.size();
            n_asked += static_cast<size_t>(k);
        }
    }
    assert(n_proposed > n_asked / 3);
}

// A draft that is stopped somewhere: the confidence in its tokens, and the one that was dropped.
void test_drafts_that_are_stopped(World & world, int n) {
    size_t n_dropped = 0;
    for (int i = 0; i < n; i++) {
        const std::string text = random_text();
        world.inner->text = text;
        const std::vector<int32_t> tokens = cut_up(*world.target, text);
        if (tokens.empty()) {
            continue;
        }
        const std::vector<int32_t> history(tokens.begin(),
                                           tokens.begin() + static_cast<std::ptrdiff_t>(1 + below(tokens.size())));
        const size_t n_own = 1 + below(6);
        const bool drops = below(2) == 0;
        size_t n_asked = 0;
        Proposal proposal;
        const auto stop = [&](double) {
            return ++n_asked < n_own ? pyfly::DraftStep::goes_on
                   : drops           ? pyfly::DraftStep::ends_before
                                     : pyfly::DraftStep::ends_behind;
        };
        world.cross.propose({{0, &history, 8, &proposal, false, {}, stop}});
        const std::vector<int32_t> & made = proposal.tokens;
        std::string then = world.target->bytes(history) + world.target->bytes(made);
        assert(text.compare(0, then.size(), then) == 0 && n_asked <= n_own);
        assert(proposal.confidence.size() - made.size() <= (drops ? 1 : 0));
        double all = 1.0;
        for (const float p : proposal.confidence) {
            all *= p;
        }
        assert(proposal.confidence.empty() || (all <= 0.5 && all >= std::pow(0.5, n_asked) - 1e-9));
        if (proposal.dropped >= 0) {
            n_dropped++;
            then += world.target->bytes({proposal.dropped});
            assert(drops && text.compare(0, then.size(), then) == 0);
        }
    }
    assert(n_dropped > static_cast<size_t>(n) / 20); // most of these texts are bytes of broken characters
}

// Bytes that are no UTF-8, and control tokens.
void test_anything(World & world, int n) {
    const int32_t both = world.target->n() - 2, other = world.target->n() - 1, end = world.target->n() - 3;
    for (int i = 0; i < n; i++) {
        std::vector<int32_t> history;
        for (int step = 0; step < 4; step++) {
            history.resize(below(history.size() + 1));
            for (size_t n_new = below(12); n_new > 0; n_new--) {
                const size_t how = below(12);
                history.push_back(how == 0   ? both
                                  : how == 1 ? other
                                  : how == 2 ? end
                                             : static_cast<int32_t>(below(how < 6 ? 256 : world.target->n())));
            }
            std::string expected, tail, found;
            for (const int32_t token : history) {
                pyfly::append_utf8(expected, tail, world.target->piece(token));
                if (token >= world.target->n() - 4) {
                    pyfly::end_utf8(expected, tail);
                    expected += token == both ? "\x01" : token == end ? "\x02" : "";
                }
            }
            for (const int32_t token : world.cross.translate(1, history)) {
                found += world.draft->piece(token);
                found += token == world.draft->n() - 2 ? "\x01" : token == world.draft->n() - 3 ? "\x02" : "";
            }
            assert(found == expected);
        }
    }
}

} // namespace

int main() {
    for (const bool has_begin : {true, false}) {
        World world = make_world(320, 300, has_begin);
        test_texts_that_grow_and_are_taken_back(world, 4'000);
        test_drafts_that_are_stopped(world, 2'000);
        test_anything(world, 1'000);
    }
    World bytes = make_world(320, 256, true); // a draft that spells
    test_texts_that_grow_and_are_taken_back(bytes, 2'000);
    std::puts("ok");
}
