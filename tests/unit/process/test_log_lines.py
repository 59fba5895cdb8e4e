"""Lines of logs."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from engine.process.log_lines import JsonFormatter, formatter_of
from tests.support.source_files import ROOT


def record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("engine.x", logging.WARNING, "f.py", 3, message, args, None)
    made.__dict__.update(fields)
    return made


@given(st.text(), st.text())
def test_a_record_is_one_line_of_json(message: str, argument: str) -> None:
    made = record("%s: %s", message, argument)
    line = JsonFormatter().format(made)
    assert line.isascii() and len(line.splitlines()) == 1
    fields = json.loads(line)
    assert list(fields) == ["time", "level", "logger", "message", "pid"]
    assert fields["message"] == f"{message}: {argument}"
    assert (fields["level"], fields["logger"]) == ("WARNING", "engine.x")
    assert fields["pid"] == made.process


def test_the_time_is_utc() -> None:
    said = json.loads(JsonFormatter().format(record("x", created=0.25)))["time"]
    assert said == "1970-01-01T00:00:00.250+00:00"
    assert datetime.fromisoformat(said).tzinfo == UTC


def test_an_exception_is_one_field() -> None:
    try:
        raise KeyError("k")
    except KeyError:
        made = record("failed", exc_info=sys.exc_info())
    fields = json.loads(JsonFormatter().format(made))
    assert fields["message"] == "failed"
    assert fields["exception"].startswith("Traceback") and fields["exception"].endswith("'k'")
    no_error = record("x", exc_info=(None, None, None))
    assert "exception" not in json.loads(JsonFormatter().format(no_error))


def test_text() -> None:
    assert formatter_of("text").format(record("few %d", 3)) == "WARNING engine.x: few 3"


def test_a_process_logs_in_its_format() -> None:
    """In a process of its own: the loggers are the whole process's."""
    code = (
        "import logging; from engine.process.log_lines import log_to_stderr\n"
        "from engine.worker.worker_role import log_as_worker\n"
        "log_as_worker(0, 'json'); logging.getLogger('torch').warning('a')\n"
        "logging.getLogger('engine.models').info('b')\n"
        "log_to_stderr(['engine'], 'WARNING', 'json')\n"
        "logging.getLogger('engine.x').info('unseen')\n"
        "logging.getLogger('engine.x').warning('c')\n"
        "log_to_stderr(['engine'], 'INFO', 'text'); logging.getLogger('engine').info('d')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    *objects, last = ran.stderr.splitlines()
    assert [json.loads(line)["message"] for line in objects] == ["a", "b", "c"]
    assert last == "INFO engine: d"
