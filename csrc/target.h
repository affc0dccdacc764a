// The target behind the handle of pyfly.h.
#pragma once

#include <memory>

#include "model.h"
#include "vocabulary.h"

struct pyfly_target {
    std::unique_ptr<pyfly::Model> model;
    pyfly::Vocabulary vocabulary;
};
