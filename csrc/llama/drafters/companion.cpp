#include "companion.h"

#include "dflash.h"
#include "draft_model.h"
#include "eagle3.h"
#include "llama/model_file.h"
#include "mtp.h"

namespace pyfly {

std::string companion_word(const llama_model * target, const std::string & path) {
    const ModelFile file(path);
    if (file.architecture() == "eagle3") {
        Eagle3::open(target, file, open_without_weights);
        return "eagle3";
    }
    if (file.architecture() == "dflash") {
        const bool is_dspark = DFlash::is_dspark(file);
        DFlash::open(target, file, is_dspark, 0, 0.0, open_without_weights);
        return is_dspark ? "dspark" : "dflash";
    }
    if (file.is_head_only()) {
        Mtp::open(target, file, 0, open_without_weights);
        return "mtp";
    }
    DraftModel::open(target, file, open_without_weights);
    return "draft";
}

} // namespace pyfly
