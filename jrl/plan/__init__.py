"""What a run will need, before it starts: `plan` puts it together, `memory` counts bytes, `sizes` compiled programs."""

from jrl.plan.plan import Plan, make_plan, num_devices

__all__ = ["Plan", "make_plan", "num_devices"]
