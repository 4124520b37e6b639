"""Text of responses, whole and in parts; names of single tokens."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jrl.models.load import byte_tokenizer
from jrl.serve.text import Pieces, TextStream, make_decode, raw_bytes

TEXT = "naïve — 漢字 🙂, done"


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def ids(tokenizer, text):
    return tokenizer(text)["input_ids"]


def parts(stream, tokens, cuts, stopped=False):
    """What the stream gives out for tokens that come in pieces ending at `cuts`, the rest last."""
    edges = [0, *cuts]
    out = [stream.feed(tokens[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return [*out, stream.finish(tokens[edges[-1] :], stopped)]


def test_parts_are_whole_characters_and_together_the_whole(tokenizer):
    tokens, decode = ids(tokenizer, TEXT), make_decode(tokenizer)
    assert len(tokens) == len(TEXT.encode()) > len(TEXT)
    single = parts(TextStream(decode), tokens, range(1, len(tokens)))
    assert "".join(single) == TEXT and all("\ufffd" not in part for part in single)
    assert [p for p in single if p] == list(TEXT)  # each character as soon as it is there
    assert "\ufffd" in decode(tokens[:3])  # which a plain decode of the first tokens is not


def test_bytes_that_are_no_text_come_out_as_the_whole_decodes(tokenizer):
    rng, decode = np.random.default_rng(0), make_decode(tokenizer)
    special = tokenizer.all_special_ids
    for _ in range(200):
        tokens = rng.integers(0, 264, 40).tolist()  # among them special ones, and ids that the tokenizer does not know
        cuts = sorted(rng.choice(np.arange(1, 40), 6, replace=False).tolist())
        assert "".join(parts(TextStream(decode), tokens, cuts)) == decode(tokens)
    assert decode(special) == ""


def test_what_is_no_text_at_all_does_not_pile_up(tokenizer):
    continuation = tokenizer.convert_tokens_to_ids("Ģ")  # the byte 0x80
    decode, sizes = make_decode(tokenizer), []
    stream = TextStream(lambda tokens: (sizes.append(len(tokens)), decode(tokens))[1])
    tokens = [continuation] * 500 + ids(tokenizer, TEXT)
    assert "".join(parts(stream, tokens, range(1, len(tokens)))) == decode(tokens) == "\ufffd" * 500 + TEXT
    assert max(sizes) < 100


def test_spaces_at_the_borders_of_parts_stay():
    vocab = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "▁": 4}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokens, decode = [1, 2, 3, 1, 4, 2], make_decode(tokenizer)
    assert decode(tokens[1:2]) == "cat"  # alone, the token loses its space
    for cut in range(1, 6):
        assert "".join(parts(TextStream(decode), tokens, range(1, cut + 1))) == decode(tokens) == "the cats the  cat"
    assert Pieces(tokenizer).name(2).text == " cat"


@pytest.mark.parametrize("stop", [("END",), ("xx", "D!", "END"), ("N",)])
def test_nothing_of_a_stop_string_is_given_out(tokenizer, stop):
    decode, text = make_decode(tokenizer), "EN, then the EN"
    tokens = ids(tokenizer, text + "D")
    given = parts(TextStream(decode, ("END",)), tokens, range(1, len(tokens)), stopped=True)
    assert "".join(given) == "EN, then the " and given[0] == given[1] == "" and given[2] == "EN,"
    free = parts(TextStream(decode, ("END",)), tokens[:-1], range(1, len(tokens) - 1))
    assert "".join(free) == text  # what turned out to be no stop string
    first = next(n for n in range(1, len(tokens) + 1) if any(s in decode(tokens[:n]) for s in stop))
    whole = TextStream(decode, stop).finish(tokens[:first], stopped=True)
    assert whole == min((text + "D").partition(s)[0] for s in stop)


def test_a_stop_string_that_min_tokens_let_pass_stays(tokenizer):
    decode = make_decode(tokenizer)
    tokens = ids(tokenizer, "a. b.")
    assert TextStream(decode, (".",)).finish(tokens, stopped=True) == "a. b"
    assert TextStream(decode, (".",)).finish(tokens, stopped=False) == "a. b."


def test_names_of_tokens(tokenizer):
    pieces = Pieces(tokenizer)
    letter, half, end = ids(tokenizer, "a")[0], ids(tokenizer, "é")[0], tokenizer.eos_token_id
    assert (pieces.name(letter).text, pieces.name(letter).bytes) == ("a", [97])
    assert (pieces.name(half).text, pieces.name(half).bytes) == ("bytes:\\xc3", [0xC3])
    assert pieces.name(end).text == "<|im_end|>" and pieces.name(263).text == ""
    seen = b"".join(bytes(pieces.name(t).bytes) for t in ids(tokenizer, TEXT))
    assert seen.decode() == TEXT
    assert raw_bytes("<0xE2>") == b"\xe2" and raw_bytes("漢") is None
