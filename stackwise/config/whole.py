"""StackWiseConfig: everything that describes a run, as validated data. YAML in, YAML out."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field

from stackwise.config.data import DataConfig
from stackwise.config.model import ModelConfig
from stackwise.config.section import ConfigError, Section
from stackwise.config.training import TrainingConfig
from stackwise.config.yaml import dump_yaml, read_yaml
from stackwise.support.files import write_whole

__all__ = ["StackWiseConfig"]


class StackWiseConfig(Section):
    """Everything that describes a run: `model`, `training`, `data`."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    data: DataConfig = Field(default_factory=DataConfig)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a YAML file; an empty one is all defaults.

        Raises:
            ConfigError: the file is not YAML, repeats a key, or describes no valid configuration.
            OSError: the file cannot be read.
        """
        try:
            mapping = read_yaml(Path(path))
        except ValueError as error:
            raise ConfigError([str(error)], str(path)) from None
        return cls.from_dict({} if mapping is None else mapping, source=str(path))

    def to_yaml(self, path: str | Path) -> None:
        """Write a YAML file; `from_yaml` gives an equal configuration back.

        Processes may all write the same one: whoever reads it finds a whole one.
        """
        write_whole(Path(path), dump_yaml(self.to_dict()))

    def validate(self) -> None:  # type: ignore[override]
        """Check everything again, rules across sections included.

        Raises:
            ConfigError: naming every refused value.
        """
        self.from_dict(self.to_dict())
