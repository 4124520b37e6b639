"""Every kind of source gives the same examples; bad input is named with its place."""

import json
import sys

import pytest

from jrl.data import load_examples
from jrl.errors import UserError

ROWS = [
    {"question": "How much is 2 + 2?", "answer": "2 + 2 = 4\n#### 4", "level": 1},
    {"question": "And 3 + 4?", "answer": "It is 7.\n#### 7", "level": 2},
]


def write_jsonl(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_jsonl_keeps_the_whole_answer_and_all_columns(tmp_path):
    examples = load_examples(write_jsonl(tmp_path / "x.jsonl", [ROWS[0], "", ROWS[1]]), prompt_suffix="\nThink.")
    assert [e.question for e in examples] == ["How much is 2 + 2?\nThink.", "And 3 + 4?\nThink."]
    assert [e.answer for e in examples] == [row["answer"] for row in ROWS]
    assert [e.columns for e in examples] == ROWS


def test_lists_and_dataset_objects_read_like_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    expected = load_examples(write_jsonl(tmp_path / "x.jsonl", ROWS))
    assert load_examples(ROWS) == expected
    assert load_examples(datasets.Dataset.from_list(ROWS)) == expected
    with pytest.raises(UserError, match="one split"):
        load_examples(datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}))


def test_hub_loader_reads_a_local_directory(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "set"
    directory.mkdir()
    write_jsonl(directory / "train.jsonl", ROWS)
    assert load_examples(f"hf:{directory}") == load_examples(f"hf:{directory}:train") == load_examples(ROWS)
    with pytest.raises(UserError, match="cannot load it"):
        load_examples(f"hf:{directory}:nonesuch")


def test_verl_parquet_needs_no_keys(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    row = {
        "data_source": "math",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "x.parquet")
    (example,) = load_examples(str(tmp_path / "x.parquet"), prompt_suffix="!")
    assert example.question == [row["prompt"][0], {"role": "user", "content": "1 + 1?!"}]
    assert example.answer == "2"
    assert example.columns == {**row, "answer": "2"}


def test_answers_that_are_no_text():
    rows = [{"question": "q", "answer": value} for value in (7, 0.5, None, ["a", "b"])]
    examples = load_examples(rows)
    assert [e.answer for e in examples] == ["7", "0.5", None, '["a", "b"]']
    assert [e.columns["answer"] for e in examples] == [7, 0.5, None, ["a", "b"]], "rewards see the value as it is"


def test_answer_column_of_another_name_is_the_answer_that_rewards_see():
    rows = [{"question": "q", "answer": "chatter", "solution": "42"}]
    (example,) = load_examples(rows, answer_key="solution")
    assert example.answer == example.columns["answer"] == example.columns["solution"] == "42"


def test_reasoning_gym_problems_depend_on_the_seed_only():
    pytest.importorskip("reasoning_gym")
    draws = [load_examples("reasoning_gym:chain_sum+products", size=20, seed=s) for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert len({e.key for e in draws[0]}) == 20
    assert [e.columns["data_source"] for e in draws[0][:2]] == ["reasoning_gym:chain_sum", "reasoning_gym:products"]


def test_reasoning_gym_options_for_all_and_for_one():
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "chain_sum": {"min_terms": 3, "max_terms": 3}}
    for example in load_examples("reasoning_gym:chain_sum+products", size=20, options=options):
        terms = 3 if example.columns["data_source"].endswith("chain_sum") else 2
        assert example.columns["metadata"]["num_terms"] == terms


def test_reasoning_gym_draws_until_exhausted_and_says_how_many_there_are():
    pytest.importorskip("reasoning_gym")
    # Two one-digit terms: 10 * 10 pairs, added or subtracted.
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    assert len({e.key for e in load_examples("reasoning_gym:chain_sum", size=200, options=options)}) == 200
    with pytest.raises(UserError, match="has 200 distinct problems where .* = 201 are wanted"):
        load_examples("reasoning_gym:chain_sum", size=201, options=options)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([ROWS[0], '{"question": "q", '], "line 2: is not JSON"),
        ([ROWS[0], "", "[1]"], "line 3: is a JSON list"),
        ([ROWS[0], {"query": "q", "answer": "a"}], r"line 2: has no column 'question' .*it has answer, query"),
        ([{"question": "q"}], r"line 1: has no column 'answer' \(data.answer_key\); it has question"),
        ([{"question": " ", "answer": "a"}], "line 1: question=' ' is neither text nor a list of messages"),
        ([{"question": [{"role": "user"}], "answer": "a"}], "line 1: question=.* is neither text nor"),
        ([{"question": "q", "answer": "a", "completions": 1}], "'completions' has the name of an argument"),
        ([""], "holds no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        load_examples(write_jsonl(tmp_path / "x.jsonl", lines))


def test_broken_bytes_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"question": "q", "answer": "a"}\n{"question": "\xff", "answer": "a"}\n')
    with pytest.raises(UserError, match="line 2: is not JSON"):
        load_examples(str(tmp_path / "x.jsonl"))
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        load_examples(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ("nowhere/x.jsonl", {}, "nowhere/x.jsonl: no such file"),
        ("x.csv", {}, "'x.csv': is none of FILE.jsonl"),
        ("hf:", {}, "write hf:ID"),
        (ROWS, {"options": {"min_terms": 2}}, "takes none"),
        ("reasoning_gym:chain_sums", {"size": 1}, "no task of that name; it has chain_sum"),
        ("reasoning_gym:chain_sum", {"size": 1, "options": {"min_term": 2}}, "min_term=2: .* has no such option"),
        ("reasoning_gym:chain_sum", {"size": 1, "options": {"seed": 2}}, "has no such option"),
        ("reasoning_gym:chain_sum", {"size": 1, "options": {"min_terms": 9, "max_terms": 2}}, "refuses them"),
        ("reasoning_gym:chain_sum", {}, "as many problems as it is told"),
        ([[1]], {}, "row 1: is a list"),
    ],
)
def test_bad_sources_are_named(source, arguments, message):
    if str(source).startswith("hf:"):
        pytest.importorskip("datasets")
    if str(source).startswith("reasoning_gym:"):
        pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=message):
        load_examples(source, **arguments)


@pytest.mark.parametrize(
    ("module", "source", "extra"),
    [
        ("datasets", "hf:x/y", "data"),
        ("pyarrow", "x.parquet", "data"),
        ("reasoning_gym.factory", "reasoning_gym:x", "rewards"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, module, source, extra):
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"pip install 'jrl\[{extra}\]'"):
        load_examples(source, size=1)
