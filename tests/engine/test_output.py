"""From tokens to text: what every place that shows or measures text agrees on."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pyfly_cpp.engine.output import Characters, Output, Piece, Token, completion_logprobs, logprobs_of, prompt_tokens

END = None
EURO, SMILE = "\u20ac".encode(), "\U0001f600".encode()


def written(pieces, stop=(), max_tokens=None, cause="context"):
    """The output after all pieces (bytes of tokens, END), and what it gave out; ended by `cause` if by nothing else."""
    output = Output(pieces.__getitem__, lambda token: pieces[token] is END, stop, max_tokens)
    out = []
    for token in range(len(pieces)):
        out.append(output.add(token))
        assert out[-1].finish is None or token + 1 == len(pieces) or output.cause
        if output.cause is not None:
            return output, out
    return output, [*out, output.end(cause)]


CASES = {
    # tokens, stop strings, most tokens: pieces of text, cause, tokens
    "an end-of-text token": ([b"Hi", b" you", END, b"no"], [], 99, ["Hi", " you"], "eog", 2),
    "an empty answer": ([END], [], 9, [], "eog", 0),
    "a full context": ([b"a", b"b"], [], 9, ["a", "b"], "context", 2),
    "most tokens": ([b"a", b"b", b"c"], [], 2, ["a", "b"], "length", 2),
    "a character of two tokens": ([b"a", EURO[:2], EURO[2:], b"!", END], [], 9, ["a", "\u20ac", "!"], "eog", 4),
    "a character of four": ([*(bytes([b]) for b in SMILE), b"!", END], [], 9, ["\U0001f600", "!"], "eog", 5),
    "a character and half of one": ([b"a" + EURO[:1], EURO[1:] + b"b", END], [], 9, ["a", "\u20acb"], "eog", 2),
    "most tokens in a character": ([b"a", EURO[:2], EURO[2:], b"!"], [], 2, ["a"], "length", 2),
    "the end in a character": ([b"a", EURO[:2], END], [], 9, ["a"], "eog", 2),
    "bytes that are no text": ([b"a\xff", b"b", b"\xc3", b"c", END], [], 9, ["a", "b", "c"], "eog", 4),
    "a lead byte alone": ([b"\xe2", b"x", b"y", END], [], 9, ["x", "y"], "eog", 3),
    "a token without text": ([b"a", b"", b"b", END], [], 9, ["a", "b"], "eog", 3),
    "a stop string in a token": ([b"one two three"], ["two"], 9, ["one "], "stop", 1),
    "a stop string over tokens": ([b"one t", b"wo thr", b"ee"], ["o th"], 9, ["one t", "w"], "stop", 2),
    "a stop string alone": ([b"END", b"x"], ["END"], 9, [], "stop", 1),
    "the earliest, not the first of the list": ([b"a one b two c"], ["two", "one"], 9, ["a "], "stop", 1),
    "the same over tokens": ([b"a on", b"e b two c"], ["two", "one"], 9, ["a "], "stop", 2),
    "one begins another": ([b"x ab", b"ab", b"c"], ["ababab", "abab"], 9, ["x "], "stop", 2),
    "one in another, at once": ([b"abcde"], ["bc", "abcd"], 9, [], "stop", 1),
    "one in another, the inner is there first": ([b"a", b"b", b"c", b"d"], ["abcd", "bc"], 9, ["a"], "stop", 3),
    "what began a stop string and was none": ([b"a ##", b"#b", END], ["####"], 9, ["a ###b"], "eog", 2),
    "it is none before the next one": ([b"##", b"##", b"x ", b"#", END], ["###a"], 9, ["####x ", "#"], "eog", 4),
    "the end where a stop string may begin": ([b"a ", b"##", END], ["####"], 9, ["a ", "##"], "eog", 2),
    "most tokens where one may begin": ([b"a ", b"##", b"x"], ["####"], 2, ["a ", "##"], "length", 2),
    "a full context where one may begin": ([b"a ", b"##"], ["####"], 9, ["a ", "##"], "context", 2),
    "characters that are held back": ([EURO[:2], EURO[2:], END], ["\u20acx"], 9, ["\u20ac"], "eog", 2),
    "a stop string behind half a token": ([b"a" + EURO[:2], EURO[2:] + b"b"], ["b"], 9, ["a", "\u20ac"], "stop", 2),
    "a stop string of split characters": ([b"a", EURO[:1], EURO[1:2], EURO[2:]], ["\u20ac"], 9, ["a"], "stop", 4),
    "a stop string before half a character": ([b"ab" + EURO[:1], EURO[1:]], ["b"], 9, ["a"], "stop", 1),
    "a stop string around lost bytes": ([b"a", b"\xff", b"b", b"c"], ["ab"], 9, [], "stop", 3),
    "a stop string in the last token": ([b"a", b"b", b"c"], ["b"], 2, ["a"], "stop", 2),
    "an empty stop string": ([b"a", b"b", END], [""], 9, ["a", "b"], "eog", 2),
    "a stop string of many tokens": ([b"x", b"y", *[b"z"] * 60], ["y" + "z" * 60], 99, ["x"], "stop", 62),
}


@pytest.mark.parametrize("name", CASES)
def test_texts(name):
    pieces, stop, max_tokens, texts, cause, n_tokens = CASES[name]
    output, given = written(pieces, stop, max_tokens)
    assert [piece.text for piece in given if piece.text] == texts
    assert (output.cause, output.n_tokens, given[-1].n_tokens) == (cause, n_tokens, n_tokens)
    assert [piece.finish for piece in given[:-1]] == [None] * (len(given) - 1)
    assert given[-1].finish == ("stop" if cause in ("eog", "stop") else "length")


def reference(pieces, stop, max_tokens):
    """The rules in one go: text, cause, tokens."""
    for n in range(1, len(pieces) + 1):
        if pieces[n - 1] is END:
            return b"".join(pieces[: n - 1]).decode("utf-8", "ignore"), "eog", n - 1
        text = b"".join(pieces[:n]).decode("utf-8", "ignore")
        places = [text.index(string) for string in stop if string and string in text]
        if places:
            return text[: min(places)], "stop", n
        if n == max_tokens:
            return text, "length", n
    return b"".join(pieces).decode("utf-8", "ignore"), "context", len(pieces)


@pytest.mark.parametrize("seed", range(40))
def test_any_tokens_and_any_stop_strings(seed):
    rng = random.Random(seed)
    parts = [b"a", b"b", b"ab", b"aab", b"", EURO, EURO[:1], EURO[:2], EURO[2:], b"a" + EURO[:1], b"\xff", SMILE]
    for _ in range(60):
        pieces = [rng.choice(parts) for _ in range(rng.randrange(12))] + [END] * rng.randrange(2)
        alphabet = "ab\u20ac\U0001f600"
        stop = ["".join(rng.choices(alphabet, k=rng.randrange(5))) for _ in range(rng.randrange(4))]
        max_tokens = rng.choice([None, 1, 5, 9])
        output, given = written(pieces, stop, max_tokens)
        text = "".join(piece.text for piece in given)
        assert (text, output.cause, output.n_tokens) == reference(pieces, stop, max_tokens), (pieces, stop)
        assert not any(string in text for string in stop if string)
        tokens = [token for piece in given for token in piece.tokens]
        assert [token.id for token in tokens] == list(range(len(tokens)))
        for piece in given:
            assert piece.text == "".join(token.text for token in piece.tokens)
        if output.cause != "stop":
            assert len(tokens) == output.n_tokens


def test_what_is_held_is_as_little_as_can_be():
    pieces = [b"one", b" two", b" st", b"op", b" then.", b" s"]
    _, given = written(pieces, ["stopped", "then?"])
    assert [piece.text for piece in given] == ["one", " two", "", "", " stop then.", "", " s"]


def test_tokens_of_a_stop_string_are_counted_and_not_told():
    _, given = written([b"one t", b"wo thr", b"ee"], ["o th"])
    assert [(token.id, token.text) for piece in given for token in piece.tokens] == [(0, "one t"), (1, "w")]
    assert given[-1].n_tokens == 2


@pytest.mark.parametrize(
    "pieces, stop, found",
    [
        ([b"one t", b"wo"], ["o th", "two"], "two"),
        ([b"a one b two c"], ["two", "one"], "one"),
        ([b"a", b"b", END], ["b!"], ""),
        ([b"x12x"], [f"{i}x" for i in range(300)], "12x"),
    ],
)
def test_the_last_piece_names_the_stop_string(pieces, stop, found):
    _, given = written(pieces, stop)
    assert [piece.stop_string for piece in given] == [*[""] * (len(given) - 1), found]


@pytest.mark.parametrize("seconds, text", [(0.0, "a\n"), (3600.0, "a\nb\nc"), (None, "a\nb\nc")])
def test_the_end_of_a_line_ends_an_answer_that_is_late(seconds, text):
    pieces = [b"a", b"\n", b"b\n", b"c", END]
    output = Output(pieces.__getitem__, lambda token: pieces[token] is END, line_seconds=seconds)
    given = []
    while output.cause is None:
        given.append(output.add(len(given)).text)
    assert "".join(given) == text
    assert output.cause == ("length" if seconds == 0 else "eog")


@pytest.mark.parametrize("stops_loops, n", [(True, 160), (False, 300)])
def test_an_answer_that_repeats_itself_is_ended(stops_loops, n):
    """Its last piece has all that was held back."""
    words, tokens = [*(f"word {i} " for i in range(20)), "ha "], [*range(20), *[20] * 280]
    output = Output(lambda token: words[token].encode(), lambda _: False, ["ha no"], 300, stops_loops=stops_loops)
    given = []
    while output.cause is None:
        given.append(output.add(tokens[len(given)]))
    assert output.n_tokens == n and (output.cause, given[-1].finish) == ("loop" if stops_loops else "length", "length")
    assert "".join(piece.text for piece in given) == "".join(words[token] for token in tokens[:n])


def test_log_probabilities_and_records_stay_with_their_tokens():
    pieces = [b"a ", b"##", b"b", END]
    rows = np.log(np.array([[1, 2, 3, 4], [4, 3, 2, 1], [1, 1, 1, 7]], dtype=np.float32) / 10)
    output = Output(pieces.__getitem__, lambda token: pieces[token] is END, ["####"], None, 2)
    given = [output.add(token, rows[token], f"record {token}") for token in range(3)] + [output.add(3)]
    assert [piece.text for piece in given] == ["a ", "", "##b", ""]
    tokens = [token for piece in given for token in piece.tokens]
    assert [token.record for token in tokens] == ["record 0", "record 1", "record 2"]
    np.testing.assert_allclose([np.exp(token.logprobs[0]) for token in tokens], [0.1, 0.3, 0.1], rtol=1e-6)
    assert [[i for i, _ in token.logprobs[1]] for token in tokens] == [[3, 2], [0, 1], [3, 0]]
    assert Output(pieces.__getitem__, lambda _: False).add(0, rows[0]).tokens[0].logprobs is None


def test_log_probabilities_of_a_row():
    row = np.random.default_rng(0).normal(size=50).astype(np.float32) * 5
    own, top = logprobs_of(row, 7, 5)
    expected = row - np.log(np.exp(row.astype(np.float64)).sum())
    assert own == pytest.approx(expected[7])
    order = np.argsort(-row)[:5]
    assert [i for i, _ in top] == order.tolist()
    assert [p for _, p in top] == pytest.approx(expected[order].tolist())
    assert logprobs_of(row, 7, 0)[1] == [] and len(logprobs_of(row, 7, 99)[1]) == 50


@pytest.mark.parametrize("n_vocab", [5, 256, 2000, 32_007])
@pytest.mark.parametrize("n_top", [1, 5, 20])
def test_the_most_probable_of_large_rows(n_vocab, n_top):
    """Numbers that occur several times, and some that are forbidden."""
    for seed in range(5):
        row = np.random.default_rng(seed).integers(0, 9 + 400 * seed, n_vocab).astype(np.float32)
        row[::3] = -np.inf
        order = np.argsort(-row, kind="stable")[:n_top].tolist()
        assert [i for i, _ in logprobs_of(row, 1, n_top)[1]] == order


def test_how_completions_lay_out_log_probabilities():
    tokens = [Token(0, "a"), Token(1, "", (-1.0, [(3, -0.5), (4, -0.7)])), Token(2, "\u20ac", (-2.0, [(3, -0.1)]))]
    assert completion_logprobs(tokens, 10, lambda token: "x" if token > 2 else "") == {
        "tokens": ["a", "", "\u20ac"],
        "text_offset": [10, 11, 11],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"x": -0.5, "": -1.0}, {"x": -0.1, "\u20ac": -2.0}],
    }


def test_tokens_of_a_prompt():
    pieces = [b"a", EURO[:2], EURO[2:]]
    tokens = prompt_tokens(range(3), pieces.__getitem__, [(-1.0, []), (-2.0, [])])
    assert tokens == [Token(0, "a"), Token(1, "", (-1.0, [])), Token(2, "\u20ac", (-2.0, []))]
    read = prompt_tokens(range(3), pieces.__getitem__, [(-1.0, [])])  # the answer ended before the last one
    assert read == [*tokens[:2], Token(2, "\u20ac")]


def test_characters():
    characters = Characters([b"a" + EURO[:1], EURO[1:], b"\xff!"].__getitem__)
    assert [characters(token) for token in range(3)] == ["a", "\u20ac", "!"]


def test_an_answer_without_tokens_can_be_ended():
    assert Output(lambda _: b"", lambda _: False).end("length") == Piece("", (), 0, "length", cause="length")
