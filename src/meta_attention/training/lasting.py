"""Transformers' Trainer for runs that may be killed, moved, and gone on with."""

from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from meta_attention.training.checkpoints import clear_write_errors, step_of


class LastingTrainer(Trainer):
    """Ends with the same model, however often it was stopped; says what it could not write."""

    def train_from(self, checkpoint: Path | None) -> None:
        """Train to the end, from a checkpoint or from scratch, and load the best model."""
        if checkpoint is None or int(step_of(checkpoint)) < self.args.max_steps:
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        else:
            # the run was stopped between its last step and its end
            if self.is_fsdp_enabled:
                prepared = self.accelerator.prepare(self.model, self.create_optimizer())
                self.model, self.optimizer = prepared
                self.model_wrapped = self.model
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            self._load_from_checkpoint(str(checkpoint))
            self.restore()
        self.find_best()
        if self.state.best_model_checkpoint is not None:
            self._load_best_model()

    @property
    def model_step(self) -> int:
        """The step whose model :meth:`train_from` has left: the best, or else the last."""
        best = self.state.best_model_checkpoint
        return self.state.global_step if best is None else int(step_of(Path(best)))

    def save_whole_model(self, folder: Path) -> None:
        """Save the model for ``from_pretrained``, also if its checkpoints are shards."""
        if self.is_fsdp_enabled:
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        self.save_model(str(folder))

    def close(self) -> None:
        """Part from the other processes, after the first one has written everything.

        What still holds their connection, a wrapped model above all, goes first: freed when the
        interpreter exits, the connection's threads would bring it down.
        """
        self.accelerator.wait_for_everyone()
        self.model_wrapped = cast(nn.Module, self.model)
        self.accelerator.free_memory()
        self.accelerator.end_training()

    def find_best(self) -> None:
        """Look for the best checkpoint where it is now; the folder may have been moved."""
        best = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.best_global_step}"
        self.state.best_model_checkpoint = str(best) if best.is_dir() else None

    def restore(self) -> None:
        """Go on from what the state of a checkpoint has beside Trainer's own."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step, folder = self.state.global_step, Path(str(self.args.output_dir))
        partial = folder / f"checkpoint-{step}" if self.args.should_save else None
        with clear_write_errors(f"the checkpoint of step {step}", folder, partial):
            super()._save_checkpoint(model, trial)
