"""jrl: reinforcement-learning post-training of language models on JAX.

`from jrl import Trainer` is the Python face, `SupervisedTrainer` that of the stages before RL. Importing `jrl` alone loads
nothing heavy.
"""

from typing import TYPE_CHECKING, Any

from jrl.errors import UserError

if TYPE_CHECKING:
    from jrl.supervised import SupervisedTrainer
    from jrl.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["SupervisedTrainer", "Trainer", "UserError"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from jrl.trainer import Trainer

        return Trainer
    if name == "SupervisedTrainer":
        from jrl.supervised import SupervisedTrainer

        return SupervisedTrainer
    raise AttributeError(f"module 'jrl' has no attribute {name!r}")
