from __future__ import annotations

from pathlib import Path

from deploy.errors import FileNotWritten, PortTaken, ProgramMissing, StartFailed


def test_messages_name_the_cause_and_the_mend():
    errors = (
        PortTaken(port=8200, purpose="http", unit="decode-0", holder="python (pid 123)", mend="free it"),
        ProgramMissing(unit="master", program="mooncake_master", cause="is missing", mend="install it"),
        FileNotWritten(path=Path("/a b/c.json"), cause="No space left on device"),
        StartFailed(unit="master", program="/x", cause="no more processes", mend="raise the limit"),
    )
    assert [str(error) for error in errors] == [
        "port 8200 (http of decode-0) is taken by python (pid 123); free it",
        "cannot start master: mooncake_master is missing; install it",
        "cannot write /a b/c.json: No space left on device; make the folder writable or choose another output folder",
        "cannot start master (/x): no more processes; raise the limit",
    ]
