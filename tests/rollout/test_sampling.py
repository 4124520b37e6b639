"""What a request may ask of sampling, and the watch for stop strings, against decoding everything anew at every token."""

import dataclasses

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rollout.sampling import MAX_STOP_IDS, Sampling, StopStrings

VOCAB = 100


def test_what_callers_write_becomes_one_hashable_form():
    written = Sampling(logit_bias={"7": 1, 3: -2.5}, stop="end", stop_ids=[4, 5], allowed_tokens=[3, 7])
    same = Sampling(logit_bias={3: -2.5, 7: 1.0}, stop=("end",), stop_ids=(4, 5), allowed_tokens=(3, 7))
    assert written == same and hash(written) == hash(same)
    assert dict(written.logit_bias) == {3: -2.5, 7: 1.0}
    assert dataclasses.replace(written, top_k=2) == dataclasses.replace(same, top_k=2) != same
    written.validate(VOCAB)
    Sampling().validate(VOCAB)
    Sampling(allowed_tokens=np.arange(4), top_p=np.float32(0.5), best=np.int64(2)).validate(VOCAB)


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 1}, {"top_p": 0.99}, {"min_p": 0.1}, {"min_tokens": 1}, {"repetition_penalty": 1.1}, {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1}, {"logit_bias": {0: 0.5}}, {"allowed_tokens": (0,)}, {"stop_ids": (0,)},
    ],
    ids=lambda asked: next(iter(asked)),
)  # fmt: skip
def test_only_what_leaves_the_distribution_alone_is_plain(asked):
    besides = Sampling(stop=("x",), best=3, prompt_logprobs=True)
    assert besides.plain and Sampling().plain
    assert not dataclasses.replace(besides, **asked).plain


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"top_k": -1}, "top_k=-1: must be a whole number of tokens, 0 for all of them"),
        ({"top_k": 2.5}, "top_k=2.5: must be a whole number"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p=1.01: must be above 0"),
        ({"top_p": float("nan")}, "top_p=nan: must be above 0"),
        ({"min_p": -0.1}, "min_p=-0.1: must be from 0"),
        ({"min_p": "0.1"}, "min_p='0.1': must be from 0"),
        ({"min_tokens": -3}, "min_tokens=-3: must be a whole number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be from 0.01 to 100, 1 for no penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty=2.1: must be from -2 to 2"),
        ({"frequency_penalty": -2.1}, "frequency_penalty=-2.1: must be from -2 to 2"),
        ({"best": 21}, "best=21: must be a whole number of tokens from 0 to 20"),
        ({"allowed_tokens": ()}, "allowed_tokens=(): leaves nothing to sample; name at least one token, or give None"),
        ({"allowed_tokens": (3, VOCAB)}, "allowed_tokens=100: is no token; ids go from 0 to 99"),
        ({"stop_ids": (-1,)}, "stop_ids=-1: is no token"),
        ({"stop_ids": ("7",)}, "stop_ids='7': is no token"),
        ({"stop_ids": range(MAX_STOP_IDS + 1)}, f"stop_ids=17 of them: give at most {MAX_STOP_IDS}"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias=100: is no token"),
        ({"logit_bias": {5: 100.5}}, "logit_bias={5: 100.5}: must be from -100 to 100"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias={5: nan}: must be from -100 to 100"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias={'five': 1.0}: give numbers by token id"),
        ({"logit_bias": [5]}, "logit_bias=[5]: give numbers by token id"),
        ({"stop": ("a", "")}, "stop='': must be a text of at least one character"),
        ({"stop": ("\ufffd",)}, "stop='\ufffd': U+FFFD stands for bytes"),
    ],
)
def test_each_mistake_is_named_with_its_remedy(asked, message):
    with pytest.raises(UserError) as error:
        Sampling(**asked).validate(VOCAB)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


# Stop strings ------------------------------------------------------------------------------------------------------


def decode_bytes(tokens):
    """A tokenizer whose tokens are single bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


def watch(stops, text, *, feeds=1, decode=decode_bytes, min_tokens=0):
    stop_strings = StopStrings(stops, decode, min_tokens)
    tokens = text.encode()
    for begin in range(0, len(tokens), feeds):
        end = stop_strings.feed(tokens[begin : begin + feeds])
        if end is not None:
            assert end == stop_strings.count
            return end
    assert stop_strings.count == len(tokens)
    return None


@pytest.mark.parametrize("feeds", [1, 3, 100])
def test_stop_strings_by_hand(feeds):
    assert watch(["lo w"], "hello world", feeds=feeds) == 7
    assert watch(["lo w", "ell"], "hello world", feeds=feeds) == 4  # the first to be complete
    assert watch(["hello wor", "o"], "hello world", feeds=feeds) == 5
    assert watch(["aab"], "aaaab", feeds=feeds) == 5  # a partial match that fails is where another begins
    assert watch(["abc"], "ab abd ab", feeds=feeds) is None
    assert watch(["é!"], "aé!", feeds=feeds) == 4
    assert watch(["é"], "è", feeds=feeds) is None  # the same first byte
    assert watch(["👍"], "é👍👍", feeds=feeds) == 6
    assert watch([], "abc", feeds=feeds) is None


def test_what_a_response_must_have_anyway_does_not_stop_it():
    assert watch(["ab"], "ab_ab", min_tokens=0) == 2
    assert watch(["ab"], "ab_ab", min_tokens=1) == 2  # begun before, completed after
    assert watch(["ab"], "ab_ab", min_tokens=2) == 5
    assert watch(["ab"], "ab_ab", min_tokens=5) is None
    assert watch(["aa"], "aaa", min_tokens=2) == 3
    assert watch(["ab"], "ab" + "_" * 200 + "ab", min_tokens=20) == 204


PIECES = [b"a", b"b", b"ab", b" ", b" a", b"\n", b"\n\nb", "é".encode(), "é".encode()[:1], "é".encode()[1:], "👍".encode(),
          *(bytes([x]) for x in "👍".encode()), "日本".encode()[:4], "日本".encode()[4:], b"", b"ba b"]  # fmt: skip


def decode_pieces(tokens):
    return b"".join(PIECES[t] for t in tokens).decode("utf-8", errors="replace")


def decode_stripped(tokens):
    """As SentencePiece has it: a space at the very start is not shown."""
    return decode_pieces(tokens).removeprefix(" ")


def decode_runs(tokens):
    """As with byte fallback: a run of bytes that is not UTF-8 as a whole becomes U+FFFD, one for each."""
    text, run = "", b""
    for piece in [*(PIECES[t] for t in tokens), None]:
        if piece is not None and not piece.isascii():
            run += piece
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        text, run = text + (piece or b"").decode(), b""
    return text


def decode_tidied(tokens):
    """As some tokenizers tidy up: a space before a line's end is dropped, so that text is taken back."""
    return decode_pieces(tokens).replace(" \n", "\n")


DECODERS = [decode_pieces, decode_stripped, decode_runs, decode_tidied]


def first_stop(stops, tokens, decode):
    """By the definition: everything decoded anew at every token."""
    return next((n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stops)), None)


def cases(decode, count):
    """Responses of up to 160 tokens, and stop strings cut from the text of some of them, or nearly so."""
    rng = np.random.default_rng(8)
    for _ in range(count):
        tokens = rng.integers(len(PIECES), size=rng.integers(1, 160)).tolist()
        text = decode(rng.integers(len(PIECES), size=90).tolist() if rng.random() < 0.2 else tokens)
        stops = []
        for _ in range(rng.integers(1, 4)):
            begin, length = rng.integers(len(text) + 1), rng.integers(3, 20)
            stops.append(text[begin : begin + length])
        stops = [s for s in stops if len(s) > 1 and "\ufffd" not in s]
        if stops:
            yield stops, tokens, int(rng.integers(1, 20))


def outcome(stops, tokens, feeds, decode, needed=None):
    stop_strings = StopStrings(stops, decode)
    if needed is not None:
        stop_strings.needed, stop_strings.limit = needed, needed
    ends = (stop_strings.feed(tokens[i : i + feeds]) for i in range(0, len(tokens), feeds))
    return next((end for end in ends if end is not None), None)


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
def test_the_end_is_where_decoding_everything_finds_it(decode):
    expected = [first_stop(stops, tokens, decode) for stops, tokens, _ in cases(decode, 1500)]
    assert [outcome(*case, decode) for case in cases(decode, 1500)] == expected
    late = sum(end is not None and end > 40 for end in expected)
    assert late > 20 and expected.count(None) > 20
    narrow = [outcome(*case, decode, needed=2) for case in cases(decode, 1500)]
    assert narrow != expected  # a window shorter than the strings overlooks some


def test_a_window_that_shows_a_string_which_the_response_lacks_ends_nothing():
    words = ["un", "##believ", "##able", " x"]

    def decode(tokens):  # as WordPiece has it: the mark of a continuation is shown at the start of a text only
        return "".join(words[t] if i == 0 else words[t].removeprefix("##") for i, t in enumerate(tokens))

    tokens = [0] + [1, 2] * 100
    assert "##" not in decode(tokens) and any("##" in decode(tokens[i:]) for i in range(1, 100))
    stop_strings = StopStrings(["##"], decode)
    assert stop_strings.feed(tokens) is None and stop_strings.start > 0
    assert stop_strings.feed([3]) is None
    assert StopStrings(["e x"], decode).feed([*tokens, 3]) == 202


@pytest.mark.parametrize("text", ["plain words, " * 300, "日本語" * 400, "👍" * 700, "a👍é" * 500], ids=ascii)
def test_the_work_for_a_token_does_not_grow_with_the_response(text):
    decoded = []

    def decode(tokens):
        decoded.append(len(tokens))
        return decode_bytes(tokens)

    assert watch(["stop", "日 本"], text, decode=decode) is None
    tokens = len(text.encode())
    assert tokens > 2000 and sum(decoded) < 150 * tokens and max(decoded) < 200
