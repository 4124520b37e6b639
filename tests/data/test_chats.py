"""Conversations as tokens: the loss lies on what the assistant wrote, and a mask that cannot be told is an error."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jrl.data.chats import Renderer, assemble, encode_conversations, encode_scored, encode_steps, fitting, steps_of
from jrl.data.records import Columns, load_records
from jrl.errors import UserError
from jrl.models.load import byte_tokenizer

CHAT = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello, <b>you</b>"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
)
CHATML = byte_tokenizer().chat_template
# As that, with earlier answers cut short once there are later messages, as templates of reasoning models do.
REWRITES = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'][:2])")
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def renderer(template=CHATML, use_chat_template=True, system_prompt=""):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return Renderer.make(tokenizer, (tokenizer.eos_token_id,), system_prompt, use_chat_template)


def learned(r, encoded):
    """The text of each run of tokens that carry loss."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.mask.astype(int), [0]])))
    return [r.tokenizer.decode(encoded.tokens[a:b]) for a, b in edges.reshape(-1, 2)]


def test_every_turn_of_the_assistant_carries_loss_with_its_eos_and_nothing_else_does():
    r = renderer()
    whole = r.encode("row", CHAT, all_turns=True)
    assert learned(r, whole) == ["Hello, <b>you</b><|im_end|>", "4<|im_end|>"]
    text = r.tokenizer.decode(whole.tokens)
    assert text == r.render("row", CHAT).removesuffix("\n")  # the template's own words, up to the last token that is learned
    assert r.tokenizer.decode(whole.tokens[: whole.prompt_len]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    last = r.encode("row", CHAT, all_turns=False)
    assert learned(r, last) == ["4<|im_end|>"] and np.array_equal(last.tokens, whole.tokens)


def test_a_conversation_ends_with_the_assistant():
    r = renderer()
    longer = (*CHAT, {"role": "user", "content": "Thanks"})
    for all_turns in (True, False):
        a, b = r.encode("row", CHAT, all_turns), r.encode("row", longer, all_turns)
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.mask, b.mask)


def test_a_template_that_marks_the_assistant_itself_gives_the_same_mask():
    plain, marked = renderer(), renderer(MARKED)
    a, b = plain.encode("row", CHAT, True), marked.encode("row", CHAT, True)
    assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.mask, b.mask) and a.prompt_len == b.prompt_len
    # What it marks is what counts: a template that leaves the EOS out teaches none.
    without = renderer(MARKED.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}"))
    assert learned(without, without.encode("row", CHAT, True)) == ["Hello, <b>you</b>", "4"]


def test_a_template_that_rewrites_earlier_turns_is_refused_by_row_and_message_unless_the_last_turn_is_all_that_is_learned():
    r = renderer(REWRITES)
    with pytest.raises(UserError, match=r"^data.jsonl line 7: message 2, .* give sft.turns=last") as caught:
        r.encode("data.jsonl line 7", CHAT, all_turns=True)
    assert "\n" not in str(caught.value)
    last = r.encode("row", CHAT[:2], all_turns=False)
    assert learned(r, last) == ["Hello, <b>you</b><|im_end|>"]


def test_a_token_across_the_border_of_a_message_is_refused_with_another_remedy():
    """A line end and a space are one token here, as in many vocabularies."""
    plain = byte_tokenizer()
    vocab = plain.get_vocab() | {"ĊĠ": len(plain)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens(list(plain.all_special_tokens))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    r = Renderer.make(tokenizer, (tokenizer.eos_token_id,), "", True)
    spaced = (CHAT[0], {"role": "assistant", "content": " Hello"})
    with pytest.raises(UserError, match="row: message 2, .* a token goes across the border.*; remove white space"):
        r.encode("row", spaced, all_turns=True)
    stripped = (CHAT[0], {"role": "assistant", "content": "Hello"})
    assert r.encode("row", stripped, all_turns=True).mask.sum() == len("Hello") + 1


def test_without_a_template_the_answer_follows_the_prompt_and_ends_with_eos():
    r = renderer(use_chat_template=False)
    encoded = r.encode("row", CHAT[2:], all_turns=True)
    assert r.tokenizer.decode(encoded.tokens) == "2 + 2?4<|im_end|>" and learned(r, encoded) == ["4<|im_end|>"]
    with pytest.raises(UserError, match="^row: a conversation of several turns needs data.use_chat_template"):
        r.encode("row", CHAT, all_turns=True)


def test_the_system_prompt_goes_before_conversations_that_have_none():
    r = renderer(system_prompt="Be brief.")
    text = r.tokenizer.decode(r.encode("row", CHAT, True).tokens)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    own = r.encode("row", ({"role": "system", "content": "Mine."}, *CHAT), True)
    assert r.tokenizer.decode(own.tokens).count("<|im_start|>system") == 1


# Rows ------------------------------------------------------------------------------------------------------------------

COLUMNS = Columns("question", "answer", "!")
TURN = {"role": "assistant", "content": "yes"}


def test_columns_become_conversations():
    sft = COLUMNS.conversation("r", {"question": "q", "answer": 7})
    assert sft.chats == (({"role": "user", "content": "q!"}, {"role": "assistant", "content": "7"}),) and sft.key == "q!"
    chat = COLUMNS.conversation("r", {"messages": list(CHAT)})
    assert chat.chats == (CHAT,) and chat.prompt == CHAT[:1]  # a whole conversation is left as it is
    pair = COLUMNS.pair("r", {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": 2})
    assert [c[-1]["content"] for c in pair.chats] == ["good", "bad"] and pair.facts == {"margin": 2.0}
    whole = COLUMNS.pair("r", {"chosen": [*CHAT[:3], TURN], "rejected": list(CHAT)})
    assert whole.prompt == CHAT[:3] and whole.chats == ((*CHAT[:3], TURN), CHAT)
    assert COLUMNS.labelled("r", {"prompt": "q", "completion": "a", "label": False}).facts == {"label": 0.0}


@pytest.mark.parametrize(
    ("method", "row", "part"),
    [
        ("conversation", {"text": "x"}, "f line 3: has no column 'question' or 'prompt' or messages \\(data"),
        ("conversation", {"question": "q"}, "f line 3: has no column 'answer'; it has question"),
        ("conversation", {"messages": "x"}, "f line 3: messages='x' is neither"),
        ("conversation", {"messages": [{"role": "user", "content": "q"}]}, "f line 3: messages has no message of the role"),
        ("conversation", {"messages": [TURN]}, "f line 3: messages starts with"),
        ("pair", {"prompt": "q", "chosen": "a"}, "f line 3: has no column 'rejected'; it has chosen, prompt"),
        ("pair", {"prompt": "q", "chosen": "a", "rejected": "a"}, "f line 3: chosen and rejected are the same"),
        ("pair", {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "x"}, "f line 3: margin='x' is not a finite"),
        ("pair", {"chosen": [*CHAT, *CHAT[:2]], "rejected": list(CHAT[:2])}, "f line 3: chosen and rejected must begin alike"),
        ("labelled", {"prompt": "q", "completion": "a", "label": 3}, "f line 3: label=3; must be true or false"),
        ("labelled", {"prompt": " ", "completion": "a", "label": 1}, "f line 3: prompt is empty"),
        ("stepwise", {"prompt": "q", "steps": ["a", "b"], "labels": [1]}, "f line 3: labels=\\[1\\] is no list of 2 numbers"),
        (
            "stepwise",
            {"prompt": "q", "steps": ["a", " \n"], "labels": [1, 1]},
            "f line 3: steps=\\['a', ' .* is no list of texts",
        ),
        ("stepwise", {"prompt": "q", "steps": ["a"], "labels": [7]}, "f line 3: labels=\\[7\\]: must be from 0"),
    ],
)
def test_mistakes_name_row_and_column(method, row, part):
    with pytest.raises(UserError, match=f"^{part}"):
        getattr(COLUMNS, method)("f line 3", row)


def test_a_step_is_one_line():
    rows = {"prompt": "q", "steps": ["a\n", "b"], "labels": [1, 0]}
    (sequence,) = encode_steps(COLUMNS.stepwise("r", rows), renderer()).sequences
    assert renderer().tokenizer.decode(sequence.tokens[sequence.prompt_len : -1]) == "a\nb\n" and sequence.mask.sum() == 2
    with pytest.raises(UserError, match=r"f line 3: the step 'a\\n\\nb' has a line break"):
        encode_steps(COLUMNS.stepwise("f line 3", rows | {"steps": ["a\n\nb"], "labels": [1]}), renderer())
    assert steps_of("a\n\n  \n b\n") == ("a", " b") and steps_of(" \n") == ()


def test_held_out_rows_share_no_prompt_with_the_others_though_prompts_repeat():
    rows = [{"prompt": f"q{i % 10}", "answer": f"a{i}"} for i in range(40)]
    sizes = {"seed": 0, "options": {}}
    train, held_out = load_records(rows, "", COLUMNS.conversation, train_size=0, eval_size=3, **sizes)
    keys = lambda records: {r.key for r in records}  # noqa: E731
    assert len(held_out) == 3 and not keys(train) & keys(held_out)
    assert len(train) == 4 * len(keys(train)) == 4 * (10 - len(keys(held_out)))  # all answers to the prompts that are left
    train, held_out = load_records(rows, rows[:2], COLUMNS.conversation, train_size=5, eval_size=0, **sizes)
    assert (len(train), len(held_out)) == (5, 2) and not keys(train) & keys(held_out)
    with pytest.raises(UserError, match="data.train_size: 99 rows are wanted, but there are 40"):
        load_records(rows, "", COLUMNS.conversation, train_size=99, eval_size=0, **sizes)


def test_rows_that_are_too_long_are_named_or_dropped():
    r = renderer()
    records = [COLUMNS.conversation(f"f line {i}", {"prompt": "q", "answer": "a" * i}) for i in (5, 50)]
    items = [encode_conversations(record, r, True) for record in records]
    longest = len(items[0].sequences[0].tokens)
    with pytest.raises(UserError, match=f"data.max_tokens={longest}: f line 50 has {longest + 45} tokens"):
        fitting(items, records, longest, "error")
    assert fitting(items, records, longest, "drop") == items[:1]
    with pytest.raises(UserError, match="all 2 rows are longer"):
        fitting(items, records, longest - 1, "drop")
    sequences = assemble(items, 100)
    assert sequences.tokens.shape == (2, 128) and sequences.lens.tolist() == [longest, longest + 45]
    assert items[0].uid != items[1].uid == encode_conversations(records[1], r, True).uid


def test_a_score_stands_after_the_eos_of_a_conversation_whatever_its_answer_begins_with():
    r = renderer()
    record = COLUMNS.pair("row", {"prompt": "q", "chosen": "  yes", "rejected": "\n\nno"})
    item = encode_scored(record, r)
    prompt = r.prompt_tokens("row", record.prompt)
    for sequence, answer in zip(item.sequences, ("  yes", "\n\nno"), strict=True):
        assert sequence.mask.sum() == 1 and sequence.mask[-1] and sequence.prompt_len == len(prompt)
        assert r.tokenizer.decode(sequence.tokens[len(prompt) : -1]) == f"{answer}<|im_end|>"
    alike = encode_scored(COLUMNS.pair("row", {"prompt": "q", "chosen": "yes", "rejected": "yes!"}), r).sequences
    assert alike[0].prompt_len == alike[1].prompt_len
