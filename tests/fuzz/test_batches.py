"""Random worlds of 2 to 16 requests on a scripted target, which join, leave, fail and are cancelled: each is what it
is alone. A case is some hundred steps of requests; a thousand are more than 10^5."""

from __future__ import annotations

import pytest
from batch_worlds import World

pytestmark = pytest.mark.fuzz


def test_each_request_is_what_it_is_alone(cases):
    for seed in cases(60):
        World(seed).run()
