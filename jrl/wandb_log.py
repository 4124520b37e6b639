"""Metrics to Weights & Biases, where `log.wandb` names a project."""

import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

from jrl.errors import UserError

ID = "wandb_id"  # file in the run's directory: a resumed run goes on in the same place


def package(project: str) -> Any:
    """The module `wandb`.

    Raises:
      UserError: it is not there.
    """
    try:
        import wandb
    except ImportError:
        raise UserError(f"config.log.wandb={project}: needs the package wandb; pip install 'jrl[wandb]'") from None
    return wandb


class Wandb:
    """One run of a project; WANDB_MODE=offline keeps it on disk, in the run's directory.

    Raises:
      UserError: the package is not there.
    """

    def __init__(self, project: str, run_dir: pathlib.Path, settings: Mapping[str, Any]):
        wandb = package(project)
        file = run_dir / ID
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=project,
            id=file.read_text().strip(),
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(settings),
            resume="allow",
        )

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
