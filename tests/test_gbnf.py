"""llama.cpp's grammars as llguidance takes them: the same texts, and no step without an end."""

from __future__ import annotations

import ctypes
import os
import random
import time
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from pyfly_cpp.grammar.gbnf import from_gbnf
from pyfly_cpp.grammar.guides import Guide, tokens_of

MODEL = Path(__file__).parents[1] / "models" / "tiny" / "tiny-llama-target-f16.gguf"

SUMS = """
# comments, and rules over several lines
root ::= sum "\\n"  # the end
sum ::= term (
    [ ]? ("+" | "-")   # between terms
    term)*
term ::= number |
    "(" sum ")"
number ::= [1-9] [0-9]{0,3} | "0"
"""
OBJECTS = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
GRAMMARS = {
    "sums": SUMS,
    "objects": OBJECTS,
    "words that overlap": 'root ::= [a-z]+ "e" [a-z]* " " ("if" | [a-z]+) "x"',
    "parts that may be left out": 'root ::= "a"? "ab"? [a-c]{2,4} (" " word)* "."\nword ::= [A-Za-z] [a-z0-9]*',
    "escapes": r'root ::= "\u00e9\x41\n" [\]\-x^] [^a-z\n]* "\"" .',
    "numbers of times": 'root ::= "ab"{2} [0-9]{2,} ("x" | "yz"){1,2} ""',
    "recursion in the middle": 'root ::= s\ns ::= "(" s ")" s | ""',
    "the last definition counts": 'root ::= "a"\nx ::= "b"\nroot ::= x+',
    "parts that are never there": 'root ::= ("a"){0,0} x{0} "b" [] [^] "c"\nx ::= "x"',
    "alternatives that nothing follows": 'root ::= "a" | [z-a] | "\\uD800" | x\nx ::= "b" x | "c" y\ny ::= "d" y | "e"',
    "no limit": 'root ::= "a"{1,2001} "b"{2,9999999999}',
    "parentheses within each other": "root ::= " + "(" * 40 + '"a"' + ")" * 40,
}


@pytest.fixture(scope="module")
def vocab():
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(os.fsencode(MODEL), params)
    yield llama_cpp.llama_model_get_vocab(model)
    llama_cpp.llama_model_free(model)


@pytest.fixture(scope="module")
def tokens(vocab):
    return tokens_of(vocab)


class Theirs:
    """What llama.cpp's own sampler allows."""

    def __init__(self, vocab, text):
        self._sampler = llama_cpp.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        n = llama_cpp.llama_vocab_n_tokens(vocab)
        self._row = np.zeros(n, dtype=np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
        self._row["id"] = np.arange(n)

    def allowed(self):
        row = self._row.copy()
        data = row.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
        array = llama_cpp.llama_token_data_array(data=data, size=len(row), selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return {*row["id"][np.isfinite(row["logit"])].tolist()}

    def accept(self, token):
        llama_cpp.llama_sampler_accept(self._sampler, token)

    def close(self):
        llama_cpp.llama_sampler_free(self._sampler)


def allowed(guide, tokens, text):
    bits = np.zeros((tokens.texts.vocab_size + 31) // 32, dtype=np.uint32)
    guide.fill(np.array(text, dtype=np.int32), bits)
    return {*np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()}


def is_text(piece):
    try:
        return piece.decode("utf-8") != ""
    except UnicodeDecodeError:
        return False


@pytest.fixture(scope="module")
def pieces(vocab, tokens):
    """Of each token, empty for those that are no text."""
    found = [tokens.texts.decode_bytes([token]) for token in range(tokens.texts.vocab_size)]
    return [
        piece if is_text(piece) and not llama_cpp.llama_vocab_is_control(vocab, token) else b""
        for token, piece in enumerate(found)
    ]


@pytest.mark.parametrize("name", GRAMMARS)
def test_texts_are_those_of_llama_cpp(vocab, tokens, pieces, name):
    """Where the next characters are certain llguidance wants them as the tokens that a tokenizer makes of them; it
    never begins a character that cannot be finished, and control tokens are no text. All else is the same."""
    ends = {*tokens.ends.tolist()}
    for seed in range(6):
        choose, text = random.Random(seed), []
        guide, theirs = Guide(tokens, from_gbnf(GRAMMARS[name])), Theirs(vocab, GRAMMARS[name])
        for _ in range(40):
            ours, llama = allowed(guide, tokens, text), theirs.allowed()
            assert bool(ours & ends) == bool(llama & ends)
            ours, llama = (sorted(token for token in both - ends if pieces[token]) for both in (ours, llama))
            if len(ours) == 1:
                assert ours[0] in llama and len({pieces[token][0] for token in llama}) == 1
            else:
                assert ours == llama
            if not ours:
                break
            text.append(choose.choice([token for token in ours if len(pieces[token]) == 1] or ours))
            theirs.accept(text[-1])
        theirs.close()


def test_what_doubles_with_each_character_has_an_end(tokens):
    """Behind texts that no trial reaches. llama.cpp follows 2^14 ways of them, and 2^100."""
    doubled = "\n".join(f"r{i} ::= r{i - 1} r{i - 1}" for i in range(1, 15))
    for grammar, text in (
        (f'root ::= "12" r14 "z"\nr0 ::= [a-z] | ""\n{doubled}', "12ab"),
        ('root ::= "12" s\ns ::= "=" s "x" | "=" s "y" | ""', "12" + "=" * 100),
    ):
        guide, ids = Guide(tokens, from_gbnf(grammar)), tokens.texts.tokenize_str(text)
        begun = time.process_time()
        assert allowed(guide, tokens, ids)
        assert time.process_time() - begun < 5, "it takes 0.1 s"


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a', "is missing at its end"),
        ("root ::= [a", "is missing at its end"),
        ('root = "a"', "`::=` is missing before '= \"a\"'"),
        ('root ::= ("a"', r"`\)` is missing"),
        ('root ::= "a" ) "b"', "the end of a line is missing"),
        ("root ::= *", "something before"),
        (r'root ::= "\q"', "an escape of GBNF"),
        (r'root ::= "\x4"', "2 hexadecimal digits"),
        ('root ::= "a"{', "a number is missing"),
        ('root ::= "a"{3,2}', "at least 3 and at most 2"),
        ('root ::= "a"{2001}', "more than 2000 times"),
        ("root ::= x", "the rule 'x'"),
        ('a ::= "x"', "no rule `root`"),
        ("root ::= <think>", "names a token"),
        ("root ::= [z-a]", "no text that ends"),
        (r'root ::= "\uD800"', "no text that ends"),
        ('root ::= "a" root', "no text that ends"),
        ("root ::= " + ".?" * 65, "more than 64 parts in a row that may be empty"),
        ("root ::= (.?){0,1900}", "what may be empty more than 20 times"),
        ("root ::= ((.{0,50}){0,50}){0,50}", "all repetitions together"),
        ("root ::= ." + "+" * 9, "more than 8 signs"),
        (
            "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(1001)) + 'r1001 ::= "a"',
            "more than 1000 rules",
        ),
        ("root ::= " + "(" * 51 + '"a"' + ")" * 51, "more than 50 parentheses"),
    ],
)
def test_what_is_none(grammar, message):
    with pytest.raises(ValueError, match=message):
        from_gbnf(grammar)
