"""The server's command line, and its process from start to end."""

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import openai
import pytest

from jrl.rollout import serve
from jrl.serve.flags import Settings, parse
from tests.serving import LONG, wait_for


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "--model"),
        (["--model=random:tiny", "--prot=1"], "--prot=1"),
        (["--model=random:tiny", "--port=x"], "invalid int value: 'x'"),
        (["--model=random:tiny", "--port=70000"], "--port=70000"),
        (["--model=random:tiny", "--slots=0"], "--slots=0: must be at least 1"),
        (["--model=random:tiny", "--api_key="], "--api_key"),
        (["--model=random:tiny", "--dtype=int4"], "--dtype=int4"),
        (["--model=random:tiny", "--weights=int4"], "--weights=int4: must be same or int8"),
        (["--model=random:tiny", "--host=0.0.0.0", "--allow_weight_updates"], "JRL_API_KEY"),
        (["--model=random:large", "--port=0"], "random:large"),
        (["--model=random:tiny", "--port=0", "--max_tokens=4000"], "2048"),
        (["--model=random:tiny", "--port=0", "--max_tokens=100", "--max_new_tokens=100"], "--max_new_tokens=100"),
        (["--model=random:tiny", "--port=0", "--num_pages=5"], "--num_pages=5"),
        (["--model=random:tiny", "--port=0", "--tensor=3"], "--tensor=3"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_status_2(args, part, capsys, monkeypatch):
    monkeypatch.delenv("JRL_API_KEY", raising=False)
    assert serve.main(args) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and part in error


def test_an_address_in_use_is_such_a_mistake(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert serve.main(["--model=random:tiny", f"--port={taken.getsockname()[1]}"]) == 2
    assert "choose another" in capsys.readouterr().err


def test_the_key_comes_from_the_environment_unless_a_flag_gives_one(monkeypatch):
    monkeypatch.setenv("JRL_API_KEY", "abc")
    settings = parse(["--model=random:tiny", "--tensor", "2"])
    assert settings == dataclasses.replace(Settings("random:tiny", name="random:tiny", tensor=2), api_key="abc")
    assert parse(["--model=random:tiny", "--api_key=def"]).api_key == "def"


@pytest.mark.parametrize("grace_s", [0, pytest.param(60, marks=pytest.mark.slow)])
def test_sigterm_ends_the_server_in_order(grace_s):
    flags = ["--model=random:tiny", "--port=0", "--decode_chunk=2", "--replica=1", "--page_size=512", "--warm_up_s=0"]
    flags.append(f"--grace_s={grace_s}")
    command = [sys.executable, "-m", "jrl.rollout.serve", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        url = re.search(r"http://\S+(?=,)", process.stderr.readline())[0]
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="random:tiny", prompt="x", stream=True, **LONG)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        if grace_s:
            assert list(stream)[-1].choices[0].finish_reason == "length"
        else:
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
