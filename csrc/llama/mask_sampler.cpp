#include "mask_sampler.h"

#include <cmath>
#include <memory>
#include <vector>

#include "chain_sampler.h"

namespace pyfly {

namespace {

// Copies share the callback, which is told the whole text each time: a copy of the chain needs no copy of the grammar.
struct Mask {
    pyfly_mask_callback callback;
    void * user;
    std::vector<uint32_t> bits;
    std::vector<int32_t> tokens = {};
    bool is_filled = false; // the bits are those of the tokens
};

Mask & mask_of(llama_sampler * sampler) {
    return *static_cast<Mask *>(sampler->ctx);
}

void accept(llama_sampler * sampler, llama_token token) {
    Mask & mask = mask_of(sampler);
    mask.tokens.push_back(token);
    mask.is_filled = false;
}

void apply(llama_sampler * sampler, llama_token_data_array * candidates) {
    Mask & mask = mask_of(sampler);
    if (!mask.is_filled &&
        mask.callback(mask.user, mask.tokens.data(), mask.tokens.size(), mask.bits.data(), mask.bits.size()) != 0) {
        for (size_t i = 0; i < candidates->size; i++) {
            candidates->data[i].logit = -INFINITY; // no token can be chosen: the step ends before this row
        }
        return;
    }
    mask.is_filled = true;
    for (size_t i = 0; i < candidates->size; i++) {
        const auto token = static_cast<uint32_t>(candidates->data[i].id);
        if ((mask.bits[token / 32] >> (token % 32) & 1) == 0) {
            candidates->data[i].logit = -INFINITY;
        }
    }
}

void reset(llama_sampler * sampler) {
    Mask & mask = mask_of(sampler);
    mask.tokens.clear();
    mask.is_filled = false;
}

llama_sampler * clone(const llama_sampler * sampler);

llama_sampler_i make_interface() {
    llama_sampler_i out = {};
    out.name = [](const llama_sampler *) { return mask_name; };
    out.accept = accept;
    out.apply = apply;
    out.reset = reset;
    out.clone = clone;
    out.free = [](llama_sampler * sampler) { delete &mask_of(sampler); };
    return out;
}

llama_sampler * make(std::unique_ptr<Mask> mask) {
    static llama_sampler_i interface = make_interface();
    llama_sampler * out = llama_sampler_init(&interface, mask.get());
    mask.release();
    return out;
}

llama_sampler * clone(const llama_sampler * sampler) {
    return make(std::make_unique<Mask>(*static_cast<const Mask *>(sampler->ctx)));
}

} // namespace

void add_mask(llama_sampler * chain, int32_t n_vocab, pyfly_mask_callback mask, void * user) {
    const int32_t place = count_shaping(chain);
    LlamaSamplerPtr added(make(std::make_unique<Mask>(Mask{mask, user, std::vector<uint32_t>((n_vocab + 31) / 32)})));
    std::vector<LlamaSamplerPtr> rest;
    while (llama_sampler_chain_n(chain) > place) {
        rest.emplace_back(llama_sampler_chain_remove(chain, place));
    }
    llama_sampler_chain_add(chain, added.release());
    for (LlamaSamplerPtr & sampler : rest) {
        llama_sampler_chain_add(chain, sampler.release());
    }
}

} // namespace pyfly
