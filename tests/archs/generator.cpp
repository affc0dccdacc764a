// Describes every architecture that llama.cpp's own test of architectures knows, those it skips included: GGUF files
// with metadata and without tensors. That test is included, not copied; GENERATOR is its path.
//
//   generator FOLDER    writes NAME-dense.gguf or NAME-moe.gguf, or both, for each architecture
#define main generator_main
#include GENERATOR
#undef main

int main(int argc, char ** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
        return 1;
    }
    for (const llm_arch arch : llm_arch_all()) {
        if (arch == LLM_ARCH_UNKNOWN) {
            continue;
        }
        for (const bool is_moe : {false, true}) {
            if (is_moe ? !moe_implemented(arch) : moe_mandatory(arch)) {
                continue;
            }
            const gguf_context_ptr described = get_gguf_ctx(arch, is_moe);
            const gguf_context_ptr file(gguf_init_empty());
            gguf_set_kv(file.get(), described.get()); // without the placeholders of some tensors
            const std::string name = std::string(llm_arch_name(arch)) + (is_moe ? "-moe" : "-dense");
            const std::string path = std::string(argv[1]) + "/" + name + ".gguf";
            if (!gguf_write_to_file(file.get(), path.c_str(), true)) {
                std::fprintf(stderr, "could not write %s\n", path.c_str());
                return 1;
            }
        }
    }
    return 0;
}
