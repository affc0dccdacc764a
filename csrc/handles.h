// What the opaque handles of pyfly.h are.
#pragma once

#include <memory>

#include "batch.h"
#include "drafters/drafter.h"
#include "model.h"
#include "vocabulary.h"

struct pyfly_target {
    std::unique_ptr<pyfly::Model> model;
    pyfly::Vocabulary vocabulary;
};

struct pyfly_drafter {
    std::unique_ptr<pyfly::Drafter> impl;
};

struct pyfly_batch {
    pyfly::Batch impl;
};
