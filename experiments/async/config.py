"""The task of experiments/algorithms by GRPO, generating on one device and learning on another.

`max_staleness` and `algorithm.rollout_is_cap` are the sweep's.
"""

import pathlib
import runpy

ALGORITHMS = pathlib.Path(__file__).parent.parent / "algorithms"


def get_config():
    c = runpy.run_path(str(ALGORITHMS / "config.py"))["get_config"]()
    c.pools.rollout = 1
    c.steps = 60
    c.rollout.slots = 64
    return c
