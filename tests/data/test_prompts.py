"""Prompts are what the tokenizer's own chat template makes of the messages, with one BOS at most."""

import logging

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jrl.data import Example, encode
from jrl.errors import UserError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a parrot.<|im_end|>\n{% endif %}" + CHATML
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML


def byte_tokenizer(chat_template=None, adds_bos=True):
    """One token per byte; <s>, </s> and the ChatML marks are special; adds <s> and </s> around plain text if asked."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>"]
    core.add_special_tokens(["<s>", "</s>", *marks])
    if adds_bos:
        pair = [(t, core.token_to_id(t)) for t in ("<s>", "</s>")]
        core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=pair)
    names = {"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": marks}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=chat_template, **names)


def example(question="1 + 1?"):
    return Example(question, "2", {"answer": "2"})


def run(tokenizer, question="1 + 1?", system="", limit=200, on_long="error", chat=True):
    return encode([example(question)], tokenizer, system, limit, on_long, chat)[0]


def test_tokens_equal_those_of_transformers():
    tokenizer = byte_tokenizer("{{ bos_token }}" + CHATML)
    chat = [{"role": "user", "content": "1 + 1? é"}]
    for system in ("", "Be brief."):
        full = [{"role": "system", "content": system}, *chat] if system else chat
        expected = tokenizer.apply_chat_template(full, tokenize=True, add_generation_prompt=True, return_dict=False)
        prompt = run(tokenizer, "1 + 1? é", system)
        assert list(prompt.tokens) == expected
        assert list(prompt.messages) == full
        assert prompt.text.endswith("<|im_start|>assistant\n")
        assert (prompt.answer, prompt.columns) == ("2", {"answer": "2"})


def test_bos_is_not_doubled():
    tokenizer = byte_tokenizer("{{ bos_token }}" + CHATML)
    prompt = run(tokenizer)
    assert prompt.tokens.count(tokenizer.bos_token_id) == 1
    # Negative control: tokenizing the rendered text the usual way has two.
    assert tokenizer(prompt.text)["input_ids"].count(tokenizer.bos_token_id) == 2


def test_plain_prompts_get_the_bos_and_no_eos():
    tokenizer = byte_tokenizer()
    tokens = run(tokenizer, "ab", "Add.", chat=False).tokens
    assert list(tokens) == [tokenizer.bos_token_id, *tokenizer("Add.\n\nab", add_special_tokens=False)["input_ids"]]
    assert run(tokenizer, "<s>ab", chat=False).tokens.count(tokenizer.bos_token_id) == 1
    assert tokenizer.bos_token_id not in run(byte_tokenizer(adds_bos=False), "ab", chat=False).tokens


def test_empty_system_prompt_suppresses_the_template_s_own():
    assert run(byte_tokenizer(DEFAULT_SYSTEM)).text == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    for template in (CHATML, NO_SYSTEM):  # templates without a text of their own get no system message at all
        assert run(byte_tokenizer(template)).text == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"


def test_messages_with_a_system_message():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    tokenizer = byte_tokenizer(DEFAULT_SYSTEM)
    assert run(tokenizer, chat).tokens == run(tokenizer, system="Be brief.").tokens
    with pytest.raises(UserError, match=r"data.system_prompt: prompt 1 .* has a system message of its own"):
        run(tokenizer, chat, system="Be long.")


def test_prompt_of_exactly_the_limit_fits_and_one_token_more_does_not():
    tokenizer = byte_tokenizer(CHATML)
    length = len(run(tokenizer).tokens)
    assert len(run(tokenizer, limit=length).tokens) == length
    with pytest.raises(UserError, match=rf"data.max_prompt_tokens={length - 1}: prompt 1 .* has {length} tokens"):
        run(tokenizer, limit=length - 1)


def test_long_prompts_are_dropped_and_counted(caplog):
    examples = [example("1 + 1?"), example("x" * 300), example("2 + 2?")]
    with caplog.at_level(logging.WARNING):
        prompts = encode(examples, byte_tokenizer(CHATML), "", 100, "drop", True)
    assert [p.messages[0]["content"] for p in prompts] == ["1 + 1?", "2 + 2?"]
    assert "dropped 1 of 3" in caplog.text
    with pytest.raises(UserError, match="all 1 prompts are longer"):
        encode(examples[1:2], byte_tokenizer(CHATML), "", 100, "drop", True)


def test_uids_tell_prompts_apart_and_stay():
    tokenizer = byte_tokenizer(CHATML)
    first, again, other = (run(tokenizer, q).uid for q in ("a", "a", "b"))
    assert first == again != other


def test_template_problems_are_named():
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        run(byte_tokenizer())
    with pytest.raises(UserError, match="refuses the roles system, user .*no system role"):
        run(byte_tokenizer(NO_SYSTEM), system="Be brief.")
