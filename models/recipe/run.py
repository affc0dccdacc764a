"""One run of the recipe: train, export, check, measure."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import nn

from pyfly_cpp import MTP, DFlash, DraftModel, DSpark, Eagle3
from pyfly_cpp.decoding.drafters import Drafter
from pyfly_cpp.machine.files import replaced
from recipe import check, shapes, train
from recipe.corpus import Corpus
from recipe.export import Header, export_dflash, export_eagle3, export_llama, export_qwen35
from recipe.folder import Folder
from recipe.llama import Llama
from recipe.qwen35 import Qwen35
from recipe.tokenizer import train_tokenizer, vocabulary
from recipe.windows import encode

DRAFT_MAX = 3
N_CHECKED_TEXTS = 3


def run(args: argparse.Namespace, corpus: Corpus, folder: Folder) -> bool:
    """Trains `args.only` into the folder; says on stdout what it does and finds. Returns whether all checks passed."""
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    return _Run(args, corpus, folder).all_parts()


class _Run:
    def __init__(self, args: argparse.Namespace, corpus: Corpus, folder: Folder) -> None:
        self.corpus, self.folder, self.parts, self.licence = corpus, folder, args.only, args.licence
        self.started = time.perf_counter()
        self.tokenizer = self.load_or_train_tokenizer()
        self.vocabulary = vocabulary(self.tokenizer)
        documents = encode(self.tokenizer, corpus.training)
        self.training = train.Training(documents, args.seed, args.steps_scale, self.say)
        self.say(
            f"{len(corpus.training)} documents, {sum(map(len, documents)) / 1e6:.2f} M tokens with their chat forms"
        )
        self.passed = True
        self.results: list[str] = []

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", flush=True)

    def all_parts(self) -> bool:
        """Every part in turn: train, export, check, measure; then all results once more."""
        for part in self.parts:
            getattr(self, part)()
        print("\n".join(["", *self.results, *self.folder.write_sums()]))
        return self.passed

    # ---- The parts ---------------------------------------------------------------------------------------------------

    def target(self) -> None:
        model = train.train_target(self.training)
        self.save("target", model)
        path = self.folder.gguf("target")
        export_llama(path, self.header("tiny-llama target"), model.shape, arrays(model))
        self.check_logits("target", model)

    def draft(self) -> None:
        model = train.train_draft(self.training, self.load_target())
        self.save("draft", model)
        path = self.folder.gguf("draft")
        export_llama(path, self.header("tiny-llama draft"), model.shape, arrays(model))
        self.check_logits("draft", model)
        self.measure("target", DraftModel(path, draft_max=DRAFT_MAX))

    def eagle3(self) -> None:
        target = self.load_target()
        head = train.train_eagle3(self.training, target)
        self.save("eagle3", head)
        path = self.folder.gguf("eagle3")
        export_eagle3(path, self.header("tiny-llama EAGLE-3 head"), head.shape, arrays(head))
        generations = self.measure("target", Eagle3(path, draft_max=DRAFT_MAX))
        self.report(check.check_eagle3(path.name, generations[:N_CHECKED_TEXTS], target, head))

    def qwen35(self) -> None:
        self.save("qwen35", train.train_qwen35(self.training))

    def mtp(self) -> None:
        trunk = self.load("qwen35", Qwen35(shapes.QWEN35))
        head = train.train_mtp(self.training, trunk)
        self.save("mtp", head)
        path = self.folder.gguf("mtp")
        export_qwen35(path, self.header("tiny-qwen35 with MTP"), trunk.shape, arrays(trunk), arrays(head))
        self.check_logits("mtp", trunk)
        generations = self.measure("mtp", MTP(draft_max=DRAFT_MAX))
        self.report(check.check_mtp(path.name, generations[:N_CHECKED_TEXTS], trunk, head))

    def dflash(self) -> None:
        self.block_head("dflash", "DFlash", shapes.DFLASH, DFlash)

    def dspark(self) -> None:
        self.block_head("dspark", "DSpark", shapes.DSPARK, DSpark)

    def block_head(self, part: str, name: str, shape: shapes.DFlashShape, drafter: type[DFlash]) -> None:
        target = self.load_target()
        head = train.train_dflash(self.training, target, part, shape)
        self.save(part, head)
        path = self.folder.gguf(part)
        header = replace(self.header(f"tiny-llama {name} head"), mask_token=shape.mask_token)
        export_dflash(path, header, shape, arrays(head))
        generations = self.measure("target", drafter(path, draft_max=DRAFT_MAX))
        self.report(check.check_dflash(path.name, generations[:N_CHECKED_TEXTS], target, head))

    # ---- Files -------------------------------------------------------------------------------------------------------

    def load_or_train_tokenizer(self) -> Tokenizer:
        path = self.folder.tokenizer
        if not path.exists():
            tokenizer = train_tokenizer([*self.corpus.training, *([self.corpus.prose] if self.corpus.prose else [])])
            tokenizer.save(str(path))
        return Tokenizer.from_file(str(path))

    def header(self, name: str) -> Header:
        return Header(name, self.licence, self.vocabulary)

    def save(self, part: str, model: nn.Module) -> None:
        with replaced(self.folder.weights(part)) as unfinished:
            torch.save(model.state_dict(), unfinished)

    def load(self, part: str, model: Any) -> Any:
        model.load_state_dict(torch.load(self.folder.weights(part), weights_only=True))
        return model.requires_grad_(False)

    def load_target(self) -> Llama:
        target: Llama = self.load("target", Llama(shapes.TARGET))
        return target

    # ---- Checks ------------------------------------------------------------------------------------------------------

    def result(self, text: str) -> None:
        self.say(text)
        self.results.append(text)

    def report(self, result: check.Check) -> None:
        self.passed &= result.passed
        self.result(f"check {'passed' if result.passed else 'FAILED'}: {result.text}")

    def check_logits(self, part: str, model: Llama | Qwen35) -> None:
        texts = ["\n\n".join(self.corpus.held_back[i : i + 3]) for i in range(0, 3 * N_CHECKED_TEXTS, 3)]
        self.report(
            check.check_logits(self.folder.gguf(part), model, texts, lambda text: self.tokenizer.encode(text).ids)
        )

    def measure(self, target: str, drafter: Drafter) -> list[check.Generation]:
        acceptance = check.measure_acceptance(self.folder.gguf(target), drafter, self.corpus.prompts)
        self.result(f"{drafter}: {acceptance}")
        return acceptance.generations


def arrays(model: nn.Module) -> dict[str, npt.NDArray[np.generic]]:
    """The weights as `export` takes them."""
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}
