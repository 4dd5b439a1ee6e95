"""What can go wrong while units are checked and started; raised by the backends, shown to the user as it is.

    DeployError
     ├── PortTaken        a planned port is in use           the user frees it or plans another
     ├── ProgramMissing   a unit's program does not exist    the user installs it or names another
     ├── FileNotWritten   a file or log cannot be written     the user makes room or grants the right
     ├── FolderNotOurs    others can change a private folder  the user removes it or has it made elsewhere
     └── StartFailed      the kernel refused to start it     the cause says who must act; may pass when tried again

`prepare` raises the first four before anything runs, `start` the last two. Each message names the cause and the mend.
"""

from __future__ import annotations

from pathlib import Path


class DeployError(Exception):
    """A unit could not be brought up."""


class PortTaken(DeployError):
    """A planned port is in use."""

    def __init__(self, *, port: int, purpose: str, unit: str, holder: str, mend: str) -> None:
        super().__init__(f"port {port} ({purpose} of {unit}) is taken by {holder}; {mend}")
        self.port = port
        self.purpose = purpose
        self.unit = unit
        self.holder = holder


class ProgramMissing(DeployError):
    """The first word of a unit's command line is no program."""

    def __init__(self, *, unit: str, program: str, cause: str, mend: str) -> None:
        super().__init__(f"cannot start {unit}: {program} {cause}; {mend}")
        self.unit = unit
        self.program = program


class FileNotWritten(DeployError):
    """A planned file or a log, or the folder it belongs in, cannot be written."""

    def __init__(self, *, path: Path, cause: str) -> None:
        super().__init__(f"cannot write {path}: {cause}; make the folder writable or choose another output folder")
        self.path = path


class FolderNotOurs(DeployError):
    """What is in a run's private folder could be replaced by another user."""

    def __init__(self, *, path: Path, cause: str) -> None:
        super().__init__(
            f"{path} {cause}, so others could put theirs in the place of what processes keep there; "
            "remove it, or set TMPDIR to a folder that is yours alone"
        )
        self.path = path


class StartFailed(DeployError):
    """The operating system did not start a program that exists."""

    def __init__(self, *, unit: str, program: str, cause: str, mend: str) -> None:
        super().__init__(f"cannot start {unit} ({program}): {cause}; {mend}")
        self.unit = unit
        self.program = program
