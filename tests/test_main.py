"""The command line: the syntax, the exit status, and what goes to stdout and to stderr."""

import json
import logging
import pathlib
import subprocess
import sys
import types

import pytest

from jrl import main as main_lib
from jrl.config_keys import KEYS
from jrl.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
TINY = f"--config={ROOT}/configs/tiny.py"


@pytest.fixture(autouse=True)
def loggers():
    """Puts back what a run as a command does to the loggers of its process."""
    root, mine = logging.root, logging.getLogger("jrl")
    before = root.handlers[:], root.level, mine.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    mine.setLevel(before[2])


@pytest.fixture
def trainer(monkeypatch):
    """A stand-in for the trainer module; what it was given and what it is to do."""
    seen = types.SimpleNamespace(config=None, error=None)

    class Trainer:
        def __init__(self, config):
            seen.config = config

        def train(self):
            print("a progress line")
            if seen.error:
                raise seen.error
            logging.getLogger("jrl.data").info("64 problems")
            logging.getLogger("another.package").info("chatter")
            return {"task": "sums", "accuracy_after": 0.5}

    monkeypatch.setitem(sys.modules, "jrl.trainer", types.SimpleNamespace(Trainer=Trainer))
    return seen


def test_every_form_of_an_override():
    args = [
        "--config=c.py:x", "--config.steps=3", "-config.seed", "4", "--config.resume", "--noconfig.log.samples",
        "--config.learner.mesh.fsdp", "-1", "--config.data.prompt_suffix= a=b",
    ]  # fmt: skip
    command = main_lib.parse(args)
    assert command.config == "c.py:x" and not command.dry_run and not command.help
    assert command.overrides == {
        "steps": "3", "seed": "4", "resume": "true", "log.samples": "false", "learner.mesh.fsdp": "-1",
        "data.prompt_suffix": " a=b",
    }  # fmt: skip
    assert main_lib.parse(["--dry_run", "--config", "c.py"]) == main_lib.Command("c.py", {}, True, False)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--conifg=x.py"], "did you mean --config?"),
        (["--dryrun"], "did you mean --dry_run?"),
        (["x.py"], "arguments start with --config"),
        (["--config"], "needs a value"),
        (["--config.steps", "--dry_run"], "needs a value"),
        (["--noconfig.resume=1"], "no such flag"),
        (["--steps=3"], "--steps=3: there is no such flag; did you mean --config.steps=3?"),
        (["--model.path", "x"], "did you mean --config.model.path?"),
        (["--data.options.max_terms=3"], "did you mean --config.data.options.max_terms=3?"),
        (["--noconfig.data.eval"], "config.data.eval is no switch but takes text"),
        (["--noconfig.data.eval"], "give --config.data.eval=VALUE"),
        (["--noconfig.eval.every_steps"], "takes a whole number"),
        (["--noconfig.data.options"], "takes a dict"),
    ],
)
def test_arguments_that_are_none(args, part):
    with pytest.raises(UserError, match="."):
        main_lib.parse(args)
    try:
        main_lib.parse(args)
    except UserError as error:
        assert part in str(error)


def test_the_last_line_is_the_summary_as_json(trainer, capsys):
    assert main_lib.main([TINY, "--config.steps=2", "--config.rollout.temperature=0.7"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert json.loads(out[-1]) == {"task": "sums", "accuracy_after": 0.5} and out[0] == "a progress line"
    assert trainer.config.steps == 2 and trainer.config.rollout.temperature == 0.7 and trainer.config.is_locked


def test_messages_stand_for_themselves_whatever_a_library_has_set_up(trainer, capsys):
    logging.root.handlers[:] = [logging.StreamHandler()]  # as if by logging.basicConfig(), which some imports call
    logging.root.handlers[0].setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    assert main_lib.main([TINY]) == 0
    assert capsys.readouterr().err == "64 problems\n"


def test_overrides_win_over_the_file_in_any_order(trainer):
    main_lib.main(["--config.run_dir=elsewhere", TINY])
    assert trainer.config.run_dir == "elsewhere"


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "--config is missing"),
        (["--config=nowhere.py"], "no such file"),
        ([TINY, "--config.rolout.group_size=4"], "did you mean rollout.group_size?"),
        ([TINY, "--config.rollout.group_size=four"], "expected a whole number"),
        ([TINY, "--config.steps=0"], "must be positive"),
        ([TINY, "--config.data.options.min_terms.x=3"], "data.options.min_terms is 2"),
        ([TINY, "--config.seed=99999999999999999999"], "must be from 0 to 4294967295"),
        ([TINY, "--noconfig.resum"], "did you mean resume?"),
        ([TINY, "--config.algorithm.minibatches=3"], "must divide rollout.prompts_per_step"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(trainer, capsys, args, part):
    assert main_lib.main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and part in captured.err
    assert trainer.config is None  # nothing was started


def test_a_users_mistake_that_the_trainer_finds(trainer, capsys):
    trainer.error = UserError("train.jsonl, line 3: not JSON;\nrepair it")
    assert main_lib.main([TINY]) == 2
    assert capsys.readouterr().err == "error: train.jsonl, line 3: not JSON; repair it\n"


def test_other_errors_keep_their_traceback(trainer):
    trainer.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main_lib.main([TINY])


def test_help_lists_every_key_with_default_and_doc(trainer, capsys):
    assert main_lib.main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for key in KEYS.values():
        default = "preset" if key.default is None else key.default
        assert f"--config.{key.name}={default!r} " in out
        assert " ".join(key.doc.split()) in out
    assert trainer.config is None


def test_dry_run_prints_the_plan_and_trains_nothing(trainer, capsys):
    assert main_lib.main([f"--config={ROOT}/configs/gsm8k_grpo.py", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "256 prompts x 5 samples = 1280 sequences" in out and "bytes per device" in out
    assert trainer.config is None


def test_the_module_runs_as_a_command_and_needs_no_accelerator_library_for_help():
    code = "import sys; from jrl.main import main; main(['--help']); assert not {'jax', 'torch'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "jrl.main", "--config=nowhere.py"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --config=nowhere.py: no such file")
