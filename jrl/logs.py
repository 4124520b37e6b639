"""The log on stderr: text for people, or a JSON object a line for machines (`log.json`)."""

import json
import logging
import os
import socket
import time


class JsonLines(logging.Formatter):
    """Time, level, message, host and process of each record, its traceback, and what is given as `extra={"fields": ..}`."""

    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row | getattr(record, "fields", {}))


def configure(as_json: bool) -> None:
    """Of the whole process; by force, as a library may have set up the root logger already."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    logging.getLogger("jrl").setLevel(logging.INFO)
    if as_json:
        logging.getLogger().handlers[0].setFormatter(JsonLines())
