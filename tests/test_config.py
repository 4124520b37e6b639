"""The schema: defaults in one place, typed overrides, and one line for every mistake."""

import pathlib

import pytest

from jrl import config as config_lib
from jrl.config import choose_pieces, default_config, flatten, load, override, parse_arg, validate, with_python_data
from jrl.config_keys import KEYS
from jrl.errors import UserError

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"


def complete(**overrides):
    """A valid config of defaults; keys with "__" for dots."""
    c = default_config()
    c.model.path, c.data.train = "random:tiny", "train.jsonl"
    for name, value in overrides.items():
        override(c, name.replace("__", "."), value)
    return c


def message(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_default_config_is_the_table():
    assert flatten(default_config()) == {name: key.default for name, key in KEYS.items()}
    validate(complete())


def test_only_the_two_keys_that_nobody_can_guess_have_to_be_set():
    c = default_config()
    c.model.path = "random:tiny"
    assert "config.data.train=''" in message(validate, c)
    c.data.train = "x.jsonl"
    validate(c)


def test_every_default_satisfies_its_own_rule_and_every_key_is_documented():
    for key in KEYS.values():
        assert key.doc and config_lib.type_name(key)
        if key.rule and key.default is not None and key.name not in ("model.path", "data.train"):
            assert key.rule.holds(key.default), key.name


def test_defaults_are_not_shared_between_configs():
    a, b = default_config(), default_config()
    a.data.options.max_terms = 3
    a.seed = 7
    assert b.data.options.to_dict() == {} and b.seed == 0 and KEYS["data.options"].default == {}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda p: p.stem)
def test_every_config_file_builds(path):
    c = load(str(path), {})
    assert c.is_locked and c.run_dir == f"runs/{path.stem}"


def test_config_argument_changes_several_keys():
    c = load(f"{CONFIGS}/tiny.py:ppo", {})
    assert c.algorithm.name == "ppo" and c.algorithm.kl_in == "reward"
    assert load(f"{CONFIGS}/tiny.py", {}).algorithm.name == "grpo"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps", "12", 12),
        ("learner.learning_rate", "3e-6", 3e-6),
        ("learner.learning_rate", "1", 1.0),
        ("resume", "true", True),
        ("resume", "False", False),
        ("model.path", "123", "123"),
        ("learner.mesh.fsdp", "-1", -1),
    ],
)
def test_text_is_read_as_the_type_of_the_key(name, text, value):
    c = complete()
    override(c, name, text)
    got = flatten(c)[name]
    assert got == value and type(got) is type(value)


def test_whole_numbers_pass_for_numbers():
    assert type(flatten(complete(learner__max_grad_norm=2))["learner.max_grad_norm"]) is float


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rollout.group_size", "many", "a whole number"),
        ("rollout.group_size", "2.5", "a whole number"),
        ("rollout.group_size", 2.5, "a whole number"),
        ("rollout.group_size", True, "a whole number"),
        ("learner.learning_rate", "fast", "a number"),
        ("resume", "maybe", "true or false"),
        ("resume", 1, "true or false"),
        ("model.path", 3, "text"),
        ("data.options", "3", "a dict"),
    ],
)
def test_wrong_types_name_key_value_and_type(name, value, expected):
    text = message(override, complete(), name, value)
    assert f"config.{name}={value!r}" in text.replace("=3:", "='3':" if value == "3" else "=3:")
    assert f"expected {expected}" in text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("learner.lerning_rate", "learner.learning_rate"),
        ("rolout.group_size", "rollout.group_size"),
        ("group_size", "rollout.group_size"),
        ("learner.mesh.fdsp", "learner.mesh.fsdp"),
        ("critic.lerning_rate", "critic.learning_rate"),
    ],
)
def test_unknown_keys_suggest_what_was_meant(name, meant):
    text = message(override, complete(), name, "1")
    assert f"config.{name}='1'" in text and text.endswith(f"did you mean {meant}?")


def test_unknown_keys_without_likeness_and_sections():
    assert "--help lists all" in message(override, complete(), "qqq", "1")
    assert "is a section" in message(override, complete(), "rollout", "1")


def test_options_take_any_name_and_read_literals():
    c = complete()
    for name, text in (("max_terms", "3"), ("allow", "true"), ("words", "a b"), ("inner.x", "[1, 2]")):
        override(c, f"data.options.{name}", text)
    assert c.data.options.to_dict() == {"max_terms": 3, "allow": True, "words": "a b", "inner": {"x": [1, 2]}}
    override(c, "data.options.max_terms", "4")
    assert c.data.options.max_terms == 4
    validate(c)


def test_an_option_that_is_a_value_has_no_parts():
    c = complete(data__options__min_terms=2, data__options__task__size=3)
    text = message(override, c, "data.options.min_terms.x", "3")
    assert text.startswith("config.data.options.min_terms.x='3': data.options.min_terms is 2")
    assert "data.options.task.size is 3" in message(override, c, "data.options.task.size.x.y", "3")
    assert c.data.options.to_dict() == {"min_terms": 2, "task": {"size": 3}}


def test_a_config_from_elsewhere_with_extra_or_missing_keys_is_refused():
    c = complete()
    with c.unlocked():
        c.rollout.group_sise = 3
    assert "did you mean rollout.group_size?" in message(validate, c)
    c = complete()
    with c.unlocked():
        del c.rollout.group_size
    assert "config.rollout.group_size: is missing" in message(validate, c)


BAD = [
    ("steps", 0, {}),
    ("seed", -1, {}),
    ("rollout.temperature", 0.0, {}),
    ("rollout.temperature", float("nan"), {}),
    ("rollout.temperature", float("inf"), {}),
    ("rollout.group_size", 1, {}),
    ("rollout.group_size", 1, {"algorithm__name": "ppo", "algorithm__dynamic_sampling": True}),
    ("rollout.mesh.replica", 0, {}),
    ("rollout.num_pages", 10, {}),
    ("learner.mesh.fsdp", -2, {}),
    ("learner.mesh.fsdp", -1, {"learner__mesh__data": -1}),
    ("rollout.mesh.replica", 4, {"learner__mesh__fsdp": 8}),
    ("critic.mesh.context", 0, {"critic__mesh__fsdp": 2}),
    ("reference.mesh.data", 2, {f"reference__mesh__{a}": 1 for a in ("fsdp", "context", "tensor")} | {"learner__mesh__fsdp": 4}),
    ("algorithm.name", "a2c", {}),
    ("algorithm.minibatches", 3, {}),
    ("algorithm.minibatches", 64, {}),  # divides the sequences, but not into whole groups
    ("algorithm.kl_coef", 0.0, {"algorithm__kl_in": "loss"}),
    ("algorithm.kl_coef", 0.1, {}),
    ("algorithm.kl_in", "both", {}),
    ("algorithm.dual_clip", 0.5, {}),
    ("algorithm.rollout_is_cap", 0.5, {}),
    ("rollout.weights", "int8", {}),
    ("rollout.kv", "int8", {}),
    ("rollout.kv", "int8", {"rollout__attention": "tpu", "algorithm__rollout_is_cap": 2.0}),
    ("rollout.weights", "int4", {"algorithm__rollout_is_cap": 2.0}),
    ("algorithm.clip_low", 1.5, {}),
    ("algorithm.gamma", 1.5, {}),
    ("learner.beta2", 1.0, {}),
    ("learner.remat", "some", {}),
    ("learner.optimizer_memory", "host", {}),
    ("critic.optimizer_memory", "cpu", {}),
    ("reference.memory", "pinned_host", {}),
    ("critic.policy_delay_steps", 100, {"algorithm__name": "ppo"}),
    ("reward.functions", "", {}),
    ("reward.functions", "last_number*much", {}),
    ("reward.functions", "last_number,,exact_match", {}),
    ("data.on_long", "cut", {}),
    ("data.train_size", 0, {"data__train": "reasoning_gym:chain_sum"}),
    ("data.eval_size", 0, {"data__eval": "reasoning_gym:chain_sum"}),
    ("checkpoint.keep", 0, {}),
    ("seed", 99999999999999999999, {}),
    ("seed", 2**32, {}),  # jax.random.key takes it for 0
    ("algorithm.kl_estimator", "k1", {"algorithm__kl_in": "loss", "algorithm__kl_coef": 0.1}),
    ("eval.every_steps", 5, {}),
    ("checkpoint.best", True, {"checkpoint__every_steps": 5}),
    ("checkpoint.best", True, {"data__eval_size": 8, "eval__every_steps": 5}),
    ("checkpoint.best", True, {"data__eval_size": 8, "checkpoint__every_steps": 5}),
    ("checkpoint.best", True, {"data__eval_size": 8, "checkpoint__every_steps": 5, "eval__every_steps": 10}),
    ("checkpoint.best", True, {"data__eval_size": 8, "checkpoint__every_steps": 6, "eval__every_steps": 4}),
    ("stage", "pretraining", {}),
    ("sft.turns", "last", {}),  # of another stage
    ("dpo.beta", 0.5, {"stage": "sft"}),
    ("dpo.label_smoothing", 0.1, {"stage": "dpo", "dpo__loss": "ipo"}),
    ("dpo.label_smoothing", 0.5, {"stage": "dpo"}),
    ("dpo.gamma", 1.0, {"stage": "dpo"}),
    ("dpo.desirable", 2.0, {"stage": "dpo", "dpo__loss": "simpo"}),
    ("dpo.loss", "ppo", {"stage": "dpo"}),
    ("reward_model.centre_coef", 0.1, {"stage": "reward_model", "reward_model__of": "steps"}),
    ("reference.mesh.fsdp", 4, {"stage": "dpo"}),
    ("reference.refresh_steps", 2, {"stage": "dpo"}),
    ("data.repeats", True, {"stage": "sft"}),
    ("plan", "auto", {"stage": "sft"}),
    ("reward.model.path", "x/hf", {}),
    ("reward.mesh.data", 2, {f"reward__mesh__{a}": 1 for a in ("fsdp", "context", "tensor")} | {"learner__mesh__fsdp": 2}),
    ("reward.judge.url", "http://x/v1", {}),
    ("reward.judge.parallel", 2, {}),
    ("reward.remote.batch_size", 2, {}),
    ("reward.sandbox.wall_s", 1.0, {}),
    ("reward.pattern", "x", {}),
    ("reward.length_free", 9, {}),
    ("reward.judge.url", "http://x/v1", {"stage": "sft"}),
    ("reference.memory", "pinned_host", {"stage": "dpo"}),
    ("critic.optimizer_memory", "pinned_host", {"stage": "sft"}),
    ("agents.turns", "a,b", {"stage": "sft"}),
    ("agents.options", {"a": {"seed": 1}}, {"stage": "sft"}),
    ("data.examples_per_step", 8, {}),
    ("data.max_tokens", 99, {}),
]


@pytest.mark.parametrize(("name", "value", "others"), BAD, ids=[f"{name}={value}" for name, value, _ in BAD])
def test_values_that_cannot_run_name_the_key(name, value, others):
    c = complete(**others)
    override(c, name, value)
    text = message(validate, c)
    assert text.startswith(f"config.{name}="), text


@pytest.mark.parametrize(
    "good",
    [
        {"algorithm__name": "ppo", "rollout__group_size": 1, "algorithm__minibatches": 32},
        {"algorithm__kl_in": "loss", "algorithm__kl_coef": 0.1},
        {
            "critic__mesh__fsdp": 2,
            "critic__mesh__data": 2,
            "critic__mesh__context": 1,
            "critic__mesh__tensor": 1,
            "learner__mesh__fsdp": 4,
        },
        {"learner__mesh__fsdp": 8, "rollout__mesh__replica": 4, "rollout__mesh__tensor": 2},
        {"rollout__num_pages": 50},
        {"algorithm__dual_clip": 3.0},
        {"rollout__weights": "int8", "rollout__kv": "int8", "algorithm__rollout_is_cap": 2.0},
        {"algorithm__rollout_is_cap": 1.0},
        {"reward__functions": "last_number*0.9, my.module:fn*-1"},
        {"data__train": "reasoning_gym:chain_sum", "data__train_size": 8},
        {"seed": 2**32 - 1},
        {"algorithm__kl_in": "reward", "algorithm__kl_coef": 0.1, "algorithm__kl_estimator": "k1"},
        {"algorithm__kl_in": "loss", "algorithm__kl_coef": 0.1, "algorithm__kl_estimator": "k2"},
        {"algorithm__kl_estimator": "k1"},  # not used
        {"eval__every_steps": 5, "data__eval": "test.jsonl"},
        {"checkpoint__every_steps": 10, "eval__every_steps": 5, "checkpoint__best": True, "data__eval_size": 8},
        {"checkpoint__every_steps": 5, "eval__every_steps": 5, "checkpoint__best": True, "data__eval": "test.jsonl"},
        {"checkpoint__every_steps": 6, "eval__every_steps": 4, "data__eval_size": 8},
        {"stage": "sft", "sft__turns": "last", "rollout__group_size": 1},  # what RL alone reads is not looked at
        {"stage": "dpo", "dpo__label_smoothing": 0.1},
        {"stage": "dpo", "dpo__loss": "simpo", "dpo__beta": 2.0, "dpo__gamma": 1.0},
        {"stage": "dpo", "dpo__loss": "kto", "dpo__desirable": 1.3},
        {"stage": "reward_model", "reward_model__centre_coef": 0.1},
        {"reward__model__path": "x/hf", "reward__functions": "last_number, reward_model*0.5"},
        {"reward__judge__url": "http://x/v1", "reward__judge__model": "m", "reward__functions": "judge"},
        {"reward__functions": "last_number, length_penalty*0.1", "reward__length_free": 9},
        {"reward__functions": "python_tests", "reward__sandbox__wall_s": 1.0},
        {"data__max_tokens": 99, "data__examples_per_step": 8, "stage": "sft"},
    ],
)
def test_neighbours_of_the_refused_values_pass(good):
    validate(complete(**good))


def test_conflicts_say_why_and_what_to_give():
    kl = complete(algorithm__kl_in="loss", algorithm__kl_coef=0.1, algorithm__kl_estimator="k1")
    assert "has mean 0" in message(validate, kl) and message(validate, kl).endswith("give k1+, k2 or k3, or kl_in=reward")
    text = message(validate, complete(rollout__weights="int8"))
    assert text.startswith("config.rollout.weights='int8': ") and "give algorithm.rollout_is_cap=2.0, or weights=same" in text
    best = {"checkpoint__best": True, "data__eval_size": 8}
    assert "give checkpoint.every_steps" in message(validate, complete(**best))
    assert "give a divisor of 6" in message(validate, complete(checkpoint__every_steps=6, eval__every_steps=4, **best))
    assert message(validate, complete(eval__every_steps=5)).endswith("give data.eval or data.eval_size, or eval.every_steps=0")


def test_a_critics_memory_needs_a_critic():
    def with_values(values):
        return values

    for chosen, algorithm in (({}, "ppo"), ({"advantage": with_values}, "grpo")):
        choose_pieces(complete(critic__optimizer_memory="pinned_host", algorithm__name=algorithm), **chosen)
    text = message(choose_pieces, complete(critic__optimizer_memory="pinned_host"))
    assert text.startswith("config.critic.optimizer_memory='pinned_host': there is no critic")


def test_data_handed_over_in_python_are_data_to_evaluate_on():
    c = complete(eval__every_steps=5)
    validate(with_python_data(c, train=True, held_out=True))
    assert "config.eval.every_steps=5" in message(validate, with_python_data(c, train=True, held_out=False))


def write(tmp_path, body: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(f"from jrl.config import default_config, parse_arg\n\ndef get_config(arg=None):\n{body}")
    return str(path)


def test_mistakes_inside_a_config_file_name_line_and_key(tmp_path):
    def problem(line: str) -> str:
        path = write(tmp_path, f"    c = default_config()\n    {line}\n    return c\n")
        return message(load, path, {}).removeprefix(f"{path}: ")

    assert problem("c.learner.lerning_rate = 3").startswith("line 5: config.learner.lerning_rate: there is no such key")
    assert "did you mean learner?" in problem("c.lerner.learning_rate = 3")
    assert 'line 5: config.learner.learning_rate = "x": expected a number' in problem('c.learner.learning_rate = "x"')
    assert "line 5: ZeroDivisionError" in problem("c.steps = 1 // 0")
    assert "SyntaxError" in problem("c.steps = = 1")


def test_config_files_that_are_not_there_or_not_configs(tmp_path):
    assert "no such file; there are" in message(load, f"{CONFIGS}/dmo.py", {})
    assert "no such file" in message(load, str(tmp_path / "nowhere" / "x.py"), {})
    assert "return jrl.config.default_config()" in message(load, write(tmp_path, "    return {}\n"), {})
    (tmp_path / "empty.py").write_text("x = 1\n")
    assert "defines no get_config()" in message(load, str(tmp_path / "empty.py"), {})
    assert "takes no argument" in message(load, f"{CONFIGS}/demo.py:small", {})
    assert "big is not known" in message(load, f"{CONFIGS}/tiny.py:big", {})


def test_parse_arg_is_typed():
    arg = parse_arg("layers=3,fast,name=x", layers=1, fast=False, name="", rate=0.5)
    assert arg.to_dict() == {"layers": 3, "fast": True, "name": "x", "rate": 0.5}
    assert parse_arg(None, layers=1).layers == 1
    assert "expected a whole number" in message(lambda: parse_arg("layers=two", layers=1))
    assert "lyers is not known" in message(lambda: parse_arg("lyers=2", layers=1))
