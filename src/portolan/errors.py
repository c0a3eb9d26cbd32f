"""Errors meant for a person: what is wrong, where, and what to do about it."""


class PortolanError(Exception):
    """A failure with a remedy. The command line prints it without a traceback.

    Args:
        message: names the offending value and the place it came from.
        remedy: what the user can do; empty when there is nothing to do.
    """

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(f"{message}\n  remedy: {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy


class UsageError(PortolanError):
    """The command, the recipe or an input is wrong (exit code 2)."""

    exit_code = 2


class ResumeRefused(PortolanError):
    """Saved state exists and none of it can be trusted (exit code 3)."""

    exit_code = 3


class StorageError(PortolanError):
    """The disk is full, read-only or refuses a write (exit code 6)."""

    exit_code = 6


class TrainingDiverged(PortolanError):
    """The loss or a gradient norm is not finite (exit code 7)."""

    exit_code = 7


class PeerLost(PortolanError):
    """Another process of the same run is gone (exit code 13)."""

    exit_code = 13
