"""A server whose texts can be compared with those of a model alone: `serve_exact.py MODEL DRAFT N_PARALLEL`.

F32 caches and no flash attention; prints its port, and ends when its stdin does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import llama_cpp

from pyfly_cpp import DraftModel, FlyBatch
from pyfly_cpp.serve.server import open_socket, serve
from pyfly_cpp.serve.settings import Settings


def main(model, draft, n_parallel):
    f32 = llama_cpp.GGML_TYPE_F32
    bound = open_socket("127.0.0.1", 0)
    with FlyBatch(
        model, int(n_parallel), drafter=DraftModel(draft, draft_max=4), n_ctx=512, n_threads=1, n_threads_batch=1,
        type_k=f32, type_v=f32, flash_attn=False, verbose=False,
    ) as batch:  # fmt: skip

        def tell():
            print(bound.getsockname()[1], flush=True)
            threading.Thread(target=end_with_stdin, daemon=True).start()

        serve(batch, Settings("tiny", sampling={"temperature": 0.0}, embeddings=True), bound, tell)


def end_with_stdin():
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
