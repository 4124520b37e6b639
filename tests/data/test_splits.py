"""Training and held-out problems have no question in common."""

import pytest

from jrl.data import Example, load_splits, overlap, split_by_question
from jrl.errors import UserError


def make(questions):
    return [Example(q, "a", {"answer": "a"}) for q in questions]


def keys(examples):
    return [e.key for e in examples]


def test_split_has_no_overlap_though_questions_repeat():
    examples = make([f"q{i % 50}{' ' * (i // 50)}" for i in range(150)])  # 50, three times, spaced differently
    train, held_out = split_by_question(examples, 40, 10, seed=0)
    assert (len(set(keys(train))), len(set(keys(held_out)))) == (40, 10)
    assert overlap(train, held_out) == 0
    # Negative control: a split by row shares questions, and `overlap` sees it.
    assert overlap(examples[:75], examples[75:]) > 0


def test_split_depends_on_the_seed_only_and_takes_all_at_size_zero():
    examples = make([f"q{i}" for i in range(30)])
    first, again, other = (split_by_question(examples, 0, 10, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(keys(first[0] + first[1])) == sorted(keys(examples))


@pytest.mark.parametrize(("train_size", "eval_size"), [(9, 2), (0, 10), (11, 0)])
def test_too_few_distinct_questions(train_size, eval_size):
    examples = make([f"q{i % 10}" for i in range(100)])
    with pytest.raises(UserError, match=r"10 distinct questions \(100 rows\)"):
        split_by_question(examples, train_size, eval_size, seed=0)


def test_questions_of_a_given_eval_source_leave_the_training_data():
    def rows(numbers):
        return [{"question": f"q{i}", "answer": "a"} for i in numbers]

    train, held_out = load_splits(rows(range(10)), rows([8, 9, 9, 10, 11]), seed=0)
    assert keys(held_out) == ["q8", "q9", "q10", "q11"]
    assert keys(train) == [f"q{i}" for i in range(8)]
    train, held_out = load_splits(rows(range(10)), rows([8, 9, 10]), train_size=5, eval_size=2, seed=0)
    assert (len(train), len(held_out), overlap(train, held_out)) == (5, 2, 0)
    with pytest.raises(UserError, match="data.train_size=9: there are 8 distinct"):
        load_splits(rows(range(10)), rows([8, 9]), train_size=9)
    with pytest.raises(UserError, match="data.eval_size=3: there are 2 distinct"):
        load_splits(rows(range(10)), rows([8, 9]), eval_size=3)


def test_reasoning_gym_reaches_its_sizes_with_one_source_or_two():
    pytest.importorskip("reasoning_gym")
    # There are 200 such problems, so all have to be found; and both sources draw the same ones in the same order.
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    for held_out in ("", "reasoning_gym:chain_sum"):
        train, evals = load_splits("reasoning_gym:chain_sum", held_out, train_size=150, eval_size=50, options=options)
        assert (len(set(keys(train))), len(set(keys(evals)))) == (150, 50)
        assert overlap(train, evals) == 0


def test_sizes_and_options_that_do_not_fit_the_source():
    rows = [{"question": "q", "answer": "a"}]
    with pytest.raises(UserError, match="data.train_size=0: .* give a number"):
        load_splits("reasoning_gym:chain_sum", eval_size=5)
    with pytest.raises(UserError, match="only reasoning-gym sources take options"):
        load_splits(rows, options={"min_terms": 2})


def test_repeats_keep_the_tasks_own_frequencies_and_share_no_question():
    options = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    wanted = {"train_size": 400, "eval_size": 40, "seed": 0, "options": options}
    train, held_out = load_splits("reasoning_gym:chain_sum", repeats=True, **wanted)
    assert len({e.key for e in train}) == 400 and len({e.key for e in held_out}) == len(held_out) == 40
    assert overlap(train, held_out) == 0

    def two_terms(examples):
        return sum(len(e.key.partition(":")[2].split()) == 4 for e in examples) / len(examples)  # "a + b ="

    # Half of the draws have two terms, of which there are 200 only; each problem once, they become rare.
    assert len(train) > 400 and 0.4 < two_terms(train) < 0.6 and 0.3 < two_terms(held_out) < 0.7
    once, _ = load_splits("reasoning_gym:chain_sum", **wanted)
    assert len(once) == 400 and two_terms(once) < 0.4


def test_repeats_are_for_one_generated_source():
    with pytest.raises(UserError, match=r"data\.repeats=True"):
        load_splits([{"question": "q", "answer": "a"}], repeats=True)
