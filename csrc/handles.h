// What the opaque handles of pyfly.h hold.
#pragma once

#include <memory>

#include "drafters/drafter.h"
#include "engine.h"
#include "target.h"

struct pyfly_target {
    std::unique_ptr<pyfly::Target> impl;
};

struct pyfly_drafter {
    std::unique_ptr<pyfly::Drafter> impl;
};

struct pyfly_engine {
    pyfly::Engine impl;
};
