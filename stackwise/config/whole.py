"""StackWiseConfig: complete configuration of a run, from and to YAML."""

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
    """Complete configuration of a run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """The Rack."""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """The training run."""
    data: DataConfig = Field(default_factory=DataConfig)
    """The data."""

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a YAML file. Missing keys have their defaults.

        Raises:
            ConfigError: the file is not YAML, repeats a key, or has an invalid value.
            OSError: the file cannot be read.
        """
        try:
            mapping = read_yaml(Path(path))
        except ValueError as error:
            raise ConfigError([str(error)], str(path)) from None
        return cls.from_dict({} if mapping is None else mapping, source=str(path))

    def to_yaml(self, path: str | Path) -> None:
        """Write a YAML file atomically. Several processes may write the same file.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), dump_yaml(self.to_dict()))

    def validate(self) -> None:  # type: ignore[override]
        """Check all values and rules.

        Raises:
            ConfigError: names every invalid value.
        """
        self.from_dict(self.to_dict())
