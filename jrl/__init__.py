"""jrl: reinforcement-learning post-training of language models on JAX.

`from jrl import Trainer` is the Python face; importing `jrl` alone loads nothing heavy.
"""

from typing import TYPE_CHECKING, Any

from jrl.errors import UserError

if TYPE_CHECKING:
    from jrl.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Trainer", "UserError"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from jrl.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'jrl' has no attribute {name!r}")
