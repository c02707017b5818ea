"""Errors that the user can act on: the command line prints their message instead of a traceback.

This module imports nothing, so that the command line can recognize the errors without importing torch.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A mistake in the configuration: where it is, what was found, what was expected and what to do, one per line."""


class ImageError(ValueError):
    """A picture that cannot be read or written."""


class RewardError(RuntimeError):
    """A reward failed or returned what cannot be used."""


class TrainingError(RuntimeError):
    """A run that cannot go on, and what to change."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, and what to do."""


class DownloadError(RuntimeError):
    """Weights that could not be fetched, and why."""
