"""TensorBoardLog: log of a run's records as TensorBoard scalars."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stackwise.stability.guard import Alarm
from stackwise.stability.telemetry import StepRecord
from stackwise.training.record_log import EVENT_FILES, ClosingLog, free_place

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardLog"]


class TensorBoardLog(ClosingLog):
    """Scalars for TensorBoard: `train/...`, norms, `throughput/...`, `validation/loss`, `alarm/...`.

    TensorBoard's writer cannot recover from a disk error: after one, nothing more is written.

    Args:
        folder: folder of the event files.
        first_step: first step of the resumed run. TensorBoard hides this step and later ones of older files.
            With 0, and if they are of another run, older files are moved to the first free one of the folders
            `before-1`, `before-2` and so on in `folder`. None: all steps stay visible.
        run: identity of the run, appended to the names of event files. None: none is appended.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], first_step: int | None = None, run: str | None = None
    ) -> None:
        self.folder = Path(folder)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "training.telemetry.tensorboard needs tensorboard >= 2.18: "
                f"pip install 'stackwise[train]' ({error})"
            ) from error
        suffix = "" if run is None else f".{run}"
        older = [*self.folder.glob(EVENT_FILES)]
        if first_step == 0:
            self._set_aside(older)
        elif first_step is not None:
            self._set_aside([file for file in older if not file.name.endswith(suffix)])
        self._writer: SummaryWriter | None = SummaryWriter(
            str(folder), purge_step=first_step, filename_suffix=suffix
        )

    def write(
        self,
        records: Sequence[StepRecord],
        figures: Mapping[str, float] | None = None,
        alarms: Sequence[Alarm] = (),
    ) -> None:
        """Queue scalars at the steps of `records`; a thread of the writer writes them to disk."""
        if self._writer is None:
            return
        try:
            self._add(self._writer, records, figures or {}, alarms)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Wait for the writer's thread, and close the file."""
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._give_up(error)

    def _set_aside(self, older: Sequence[Path]) -> None:
        if older:
            place = free_place(self.folder / "before", "before-")
            place.mkdir()
            for file in older:
                file.rename(place / file.name)

    @staticmethod
    def _add(
        writer: SummaryWriter,
        records: Sequence[StepRecord],
        figures: Mapping[str, float],
        alarms: Sequence[Alarm],
    ) -> None:
        for record in records:
            scalars = record.to_dict()
            step, _ = scalars.pop("step"), scalars.pop("unit", None)
            for name, norm in scalars.pop("parameter_norms", {}).items():
                writer.add_scalar(f"gradient_norm/{name}", norm, step)
            for name, value in scalars.items():
                writer.add_scalar(f"train/{name}", float(value), step)
        if records:
            for name, value in figures.items():
                tag = "validation/loss" if name == "validation_loss" else f"throughput/{name}"
                writer.add_scalar(tag, value, records[-1].step)
        for alarm in alarms:
            writer.add_scalar(f"alarm/{alarm.kind.replace(' ', '_')}", alarm.value, alarm.step)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        warnings.warn(f"{self.folder}: nothing more is written: {error}", stacklevel=3)
