"""A training process whose breakpoints Ray's debugger finds: python -m jrl.launch.debug MODULE [ARG ...]

`python -m jrl.launch.ray --debug` runs jrl.main by this. Ray's debuggers know tasks and actors; the training is a child of one.
So it joins the cluster as a driver before anything else, and `breakpoint()` anywhere in it then waits for `ray debug`,
which lists it. That is the debugger for terminals, which Ray calls legacy; the other attaches from VS Code to Ray's own workers
alone.
"""

import os
import runpy
import sys

ENVIRONMENT = {"RAY_DEBUG": "legacy"}  # what the process finds the debugger by; the cluster it is told in any case


def main() -> None:
    """Joins the cluster, and becomes the module that the first argument names."""
    import ray
    from ray.util import rpdb

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    sys.breakpointhook = rpdb.set_trace  # a driver's is a debugger for its own terminal, which there is not
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
