"""What `python -m jrl.main` does on each host of a run, without a model: a process of the tests of launchers.

    python -m tests.launch.stand_in RUN_DIR STEPS [--SWITCH=PROCESS ...] [--config.resume=True]

Process 0 writes config.json, metrics.jsonl and, after every second step, a checkpoint. SIGTERM saves and leaves. The processes go
in step, as those of a real run do, and one whose others are gone leaves with status 3.

Switches, of the first attempt only: --kill, --fail and --stop, a process that in its third step kills itself, raises, or meets a
breakpoint; --mistake and --early, one that tells of a mistake or dies before it begins. --slow=0: a tenth of a second a step.
"""

import json
import os
import pathlib
import signal
import sys
import time

ME, COUNT = int(os.environ.get("JAX_PROCESS_ID", "0")), int(os.environ.get("JAX_NUM_PROCESSES", "1"))
GONE_AFTER_S = 100 if any(arg.startswith("--stop") for arg in sys.argv) else 2  # a person debugs


def main() -> int:
    folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    switches = dict(arg.removeprefix("--").split("=") for arg in sys.argv[3:])
    resume, saved, leave = "config.resume" in switches, folder / "checkpoint", folder.with_name("leave")
    attempt = len(list(folder.parent.glob(f"attempt.{ME}.*")))
    folder.with_name(f"attempt.{ME}.{attempt}").touch()
    hit = lambda name: attempt == 0 and switches.get(name) == str(ME)  # noqa: E731
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    if hit("mistake"):
        print("error: config.data.train='nothing.jsonl': no such file", file=sys.stderr)
        return 2
    if hit("early"):
        os.kill(os.getpid(), signal.SIGKILL)
    _meet(folder, f"start {attempt}")
    if ME == 0 and not resume and folder.exists():
        folder.rename(folder.with_name("run.1"))
    begin = int(saved.read_text()) if resume and saved.exists() else 0
    if ME == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"steps": steps, "address": os.environ.get("JAX_COORDINATOR_ADDRESS")}))
    for step in range(begin, steps):
        if ME == 0 and told:
            leave.touch()  # before the others have come here, so all see it at the same step
        _meet(folder, f"step {step} {attempt}")
        if leave.exists():
            if ME == 0:
                saved.write_text(str(step))
                print(json.dumps({"interrupted": "SIGTERM", "steps": step}))
            return 0
        print(f"step {step + 1}/{steps}", file=sys.stderr)
        if ME == 0:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "kind": "train", "train/accuracy": step / steps}) + "\n")
            if (step + 1) % 2 == 0:
                saved.write_text(str(step + 1))
        if step == 2 and hit("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2 and hit("stop"):
            breakpoint()
        if step == 2 and hit("fail"):
            raise RuntimeError("the reactor is out of coolant")
        time.sleep(0.1 if "slow" in switches else 0.01)
    if ME == 0:
        print(json.dumps({"steps": steps, "began_at": begin}))
    return 0


def _meet(folder: pathlib.Path, where: str) -> None:
    """Waits until all processes are here."""
    places = folder.with_name("meetings") / where
    places.mkdir(parents=True, exist_ok=True)
    (places / str(ME)).touch()
    deadline = time.monotonic() + GONE_AFTER_S
    while len(list(places.iterdir())) < COUNT:
        if time.monotonic() > deadline:
            print("another process is gone", file=sys.stderr)
            sys.exit(3)
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
