"""JetStream's driver, orchestrator and gRPC server over the paged engine, against the native engine."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from tokenizers import processors

from jrl.errors import UserError
from jrl.models.load import byte_tokenizer
from jrl.rollout import jetstream_serve
from jrl.rollout.scheduler import Request
from jrl.sharding.layout import Layout
from tests.test_invariants import ARCH, EOS, make_engine, make_params

try:
    from jrl.rollout.jetstream import compat
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)

import grpc

from jrl.rollout.jetstream import flags, server
from jrl.rollout.jetstream.compat import jetstream_pb2, jetstream_pb2_grpc, orchestrator, token_utils
from jrl.rollout.jetstream.engine import JetStreamEngine, Weights
from jrl.rollout.jetstream.tokenizer import JetStreamTokenizer

PAGE, LONGEST, NEW, SEED = 32, 32, 24, 7  # few programs: a sequence has one page or two
PROMPTS = [np.random.default_rng(n).integers(3, 260, n).astype(np.int32) for n in (1, 20, 15, 16, LONGEST, 31, 2, 24, 17, 9)]
PINNED = f"google-jetstream=={compat.VERSION}"


class Watched(JetStreamEngine):
    """Shows the state that JetStream's thread holds."""

    def init_decode_state(self):
        self.state = super().init_decode_state()
        return self.state


@functools.cache
def params():
    return jax.device_put(jax.tree.map(np.asarray, make_params()), jax.devices()[0])


def engine(device=0, **options):
    layout = Layout.rollout({}, jax.devices()[device : device + 1])
    settings = {"slots": 3, "max_tokens": 64, "max_prefill_length": LONGEST, "page_size": PAGE, "seed": SEED} | options
    return Watched(
        ARCH, layout, byte_tokenizer(), EOS, Weights(jax.device_put(params(), layout.mesh.devices.flat[0])), **settings
    )


@pytest.fixture(scope="module")
def greedy():
    return engine()


@pytest.fixture(scope="module")
def native():
    """(prompts, samples, temperature) -> for each prompt its samples' tokens, without the EOS, which JetStream keeps back."""
    native = make_engine(page_size=64, decode_chunk=NEW, slots=6, seed=SEED)  # one page a sequence: one program

    def generate(prompts, samples=1, temperature=0.0, weights=None):
        native.load(params() if weights is None else weights, 0)
        requests = [Request(p, samples, NEW, temperature, i * samples) for i, p in enumerate(prompts)]
        out = sorted(native.generate(requests), key=lambda c: (c.request, c.sample))
        tokens = [c.tokens[: -1 if c.stop_reason == "eos" else None].tolist() for c in out]
        return [tokens[i : i + samples] for i in range(0, len(tokens), samples)]

    return generate


@contextlib.contextmanager
def driver(prefill, generate=None):
    engines = [prefill], [generate or prefill]
    it = orchestrator.Driver(*engines, *([e.load_params() for e in es] for es in engines), interleaved_mode=generate is None)
    try:
        yield it
        assert it.live
    finally:
        it.stop()


def request(prompt, new_tokens=NEW, session=""):
    kind = jetstream_pb2.DecodeRequest
    content = {"text_content": kind.TextContent(text=prompt)} if isinstance(prompt, str) else {
        "token_content": kind.TokenContent(token_ids=list(prompt))
    }  # fmt: skip
    return kind(max_tokens=new_tokens, session_cache=session, **content)


def joined(responses):
    """What each sample has got in all."""
    samples = zip(*(r.stream_content.samples for r in responses), strict=True)
    return [[int(token) for part in parts for token in part.token_ids] for parts in samples]


def ask(it, prompts, at_once=True):
    """Each prompt's samples."""
    servicer = orchestrator.LLMOrchestrator(it)

    async def one(prompt):
        return joined([response async for response in servicer.Decode(request(prompt))])

    async def every():
        return await asyncio.gather(*map(one, prompts)) if at_once else [await one(p) for p in prompts]

    return asyncio.run(every())


@pytest.mark.parametrize("apart", [False, True], ids=["interleaved", "disaggregated"])
def test_more_requests_than_slots_get_the_native_engines_tokens(apart, greedy, native):
    want = native(PROMPTS)
    lengths = {len(tokens) for (tokens,) in want}
    assert NEW in lengths and len(lengths) > 3  # some end by themselves, at several lengths
    with driver(engine(device=1), greedy) if apart else driver(greedy) as it:
        assert ask(it, PROMPTS) == want
    state = greedy.state
    state.check()
    pages = state.replica.pages
    assert state.inserted == len(PROMPTS) > len(state.replica.busy) == greedy.max_concurrent_decodes
    assert pages.free + pages.used == pages.num_pages - 1 and 3 <= pages.used <= 6
    held = state.replica.slots[0].pages
    pages.release(held)
    with pytest.raises(AssertionError):
        state.check()  # a page that is free and held


def test_samples_of_a_slot_share_their_prompt_and_are_the_native_engines(native):
    both = engine(samples_per_slot=2, temperature=1.0, page_size=16, slots=1)
    prompts = [PROMPTS[i] for i in (8, 1, 5)]
    with driver(both) as it:
        got = ask(it, prompts, at_once=False)  # the order of insertion numbers the samples
    assert got == native(prompts, samples=2, temperature=1.0)
    assert any(a != b for a, b in got)
    both.state.check()
    a, b = (sample.pages for _, sample in both.state.replica.busy)
    assert len(prompts[-1]) == 31 and a[0] == b[0] and not set(a[1:]) & set(b[1:])  # 30 tokens: a page and a part of one


def test_weights_are_swapped_through_their_holder(greedy, native):
    old = greedy.weights.params
    new = jax.device_put(jax.tree.map(lambda x: np.asarray(x)[..., ::-1], old), jax.devices()[0])
    with driver(greedy) as it:
        before = ask(it, PROMPTS[1:4])
        greedy.weights.params = new
        try:
            after = ask(it, PROMPTS[1:4])
        finally:
            greedy.weights.params = old
    assert before == native(PROMPTS[1:4]) != after == native(PROMPTS[1:4], weights=new)


def test_who_goes_away_harms_nobody(greedy, native):
    with driver(greedy) as it:
        for prompt in PROMPTS[6:8]:  # their event loops are closed after the first token, and their slots go on
            asyncio.run(anext(orchestrator.LLMOrchestrator(it).Decode(request(prompt))))
        assert ask(it, PROMPTS[1:4]) == native(PROMPTS[1:4])


def padded(tokens):
    """As JetStream pads: to a power of two."""
    return np.pad(tokens, (0, max(16, 1 << (len(tokens) - 1).bit_length()) - len(tokens)))


def decoded(it, prefix):
    """The greedy response of a prompt that is cached, without the EOS."""
    state, out = it.insert(prefix, it.init_decode_state(), 0), []
    for _ in range(NEW):
        state, result = it.generate(it.weights, state)
        data = result.convert_to_numpy().get_result_at_slot(0)
        if not data.valid[0, 0]:
            break
        out.append(int(data.tokens[0, 0]))
    return out[: -1 if out[-1] in EOS else None]


def in_parts(it, prompt, *cuts):
    """The prefix of a prompt that is cached part by part."""
    prefix = None
    for part in np.split(prompt, cuts):
        prefix = it.prefill(params=it.weights, existing_prefix=prefix, padded_tokens=padded(part), true_length=len(part))
    return prefix


@pytest.mark.parametrize(
    "cuts",
    [
        (17, 20),  # within pages
        pytest.param((1,), marks=pytest.mark.slow),  # of the first part nothing is cached
        pytest.param((16, 38), marks=pytest.mark.slow),  # between pages; a last part of one token
    ],
)
def test_a_prompt_cached_in_parts_is_the_same_prompt(cuts, native):
    it = engine(page_size=8, slots=1, max_tokens=128)
    prompt = np.random.default_rng(5).integers(3, 260, 39).astype(np.int32)
    whole = in_parts(it, prompt)
    (want,) = native([prompt])[0]
    assert decoded(it, whole) == want
    prefix = in_parts(it, prompt, *cuts)
    assert prefix.tokens == whole.tokens and decoded(it, prefix) == want


def test_a_prefix_goes_on_in_several_ways(native):
    it = engine(page_size=8, slots=1, max_tokens=128)
    prompt = np.random.default_rng(5).integers(3, 260, 39).astype(np.int32)
    first, rest = in_parts(it, prompt[:17]), prompt[17:]
    for end in (rest, rest[::-1]):
        got = it.prefill(params=it.weights, existing_prefix=first, padded_tokens=padded(end), true_length=len(end))
        (want,) = native([np.concatenate([prompt[:17], end])])[0]
        assert decoded(it, got) == want


def test_a_prompt_in_parts_that_is_too_long_or_began_badly_is_not_cached(greedy):
    first = in_parts(greedy, PROMPTS[4])
    with pytest.raises(ValueError, match="32 . 32 prompt tokens leave no room within 64"):
        greedy.prefill(params=greedy.weights, existing_prefix=first, padded_tokens=PROMPTS[4], true_length=32)
    refused = greedy.prefill(params=greedy.weights, padded_tokens=padded(PROMPTS[1]), true_length=0)
    assert greedy.prefill(
        params=greedy.weights, existing_prefix=refused, padded_tokens=padded(PROMPTS[1]), true_length=20
    ).tokens == ()  # fmt: skip


def test_flags_of_the_other_server_mean_the_same():
    """Integers for weights and pages, and layers one by one."""
    options = ["--model=random:tiny", "--replica=1", "--max_tokens=64", "--page_size=32", "--slots=1"]
    (plain,) = server.make_engines(flags.parse(options))
    (it,) = server.make_engines(flags.parse([*options, "--weights=int8", "--kv=int8", "--unroll_layers=on"]))
    (scanned,) = server.make_engines(flags.parse([*options, "--attention=xla"]))
    for engine, weights, pages in ((plain, {"float32"}, {"float32"}), (it, *[{"int8", "float32"}] * 2)):
        assert {x.dtype.name for x in jax.tree.leaves(engine.weights.params)} == weights
        assert {x.dtype.name for x in engine.init_decode_state().pool.values()} == pages
    layers = [engine._decode_params(engine.weights.params)["layers"] for engine in (scanned, it)]
    assert [type(x) for x in layers] == [dict, tuple]


@pytest.mark.slow
def test_integer_pages_and_layers_one_by_one_give_the_native_engines_tokens():
    native = make_engine(page_size=64, decode_chunk=NEW, slots=1, seed=SEED, kv="int8")
    native.load(params(), 0)
    (want,) = native.generate([Request(PROMPTS[1], 1, NEW, 0.0, 0)])
    it = engine(kv="int8", unroll_layers=True, slots=1)
    got = decoded(it, in_parts(it, PROMPTS[1]))
    assert got == want.tokens[: -1 if want.stop_reason == "eos" else None].tolist() and got


@pytest.fixture(scope="module")
def stub(greedy):
    port = server.find_port("port", "127.0.0.1", 0)
    it = server.start([greedy], "127.0.0.1", port)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield jetstream_pb2_grpc.OrchestratorStub(channel)
    assert it._driver.live
    server.stop(it, 0)


def test_clients_of_the_grpc_server_get_the_native_engines_tokens(stub, native):
    assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as clients:
        got = list(clients.map(lambda p: joined(stub.Decode(request(p), timeout=60)), PROMPTS))
    assert got == native(PROMPTS)


def test_what_cannot_be_served_gets_no_response_and_harms_nobody(stub, native, caplog):
    with caplog.at_level(logging.WARNING, "jrl"):
        for ids in ([], [5, ARCH.vocab_size], [-1, 5]):
            assert joined(stub.Decode(request(ids), timeout=60)) == [[]]
    assert [r.name for r in caplog.records].count("jrl") == 3
    assert joined(stub.Decode(request(PROMPTS[1], 0), timeout=60)) == [[]]
    long = np.arange(3, 43)
    assert joined(stub.Decode(request(long), timeout=60)) == native([long[-LONGEST:]])[0]
    session = joined(
        stub.Decode(request(PROMPTS[1], 4, "session"), timeout=60)
    )  # JetStream itself would fail, and end the process
    assert session == [native([PROMPTS[1]])[0][0][:4]]


def test_texts_are_what_the_native_engine_makes_of_them(stub, native):
    text, tokenizer = "Wie schön, 5 € für 日本!", byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    (want,) = native([np.array(ids, np.int32)])[0]
    responses = list(stub.Decode(request(text), timeout=60))
    assert joined(responses) == [want] and len(want) > 1
    got = "".join(response.stream_content.samples[0].text for response in responses)
    assert got == tokenizer.decode(want, skip_special_tokens=True)


def test_the_tokenizer_puts_a_bos_where_the_models_own_does_and_joins_characters():
    plain, with_bos = byte_tokenizer(), byte_tokenizer()
    bos, text = plain.bos_token_id, "naïve 日本 \N{GRINNING FACE}"
    with_bos.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    ids = plain(text)["input_ids"]
    for tokenizer, want in ((plain, ids), (with_bos, [bos, *ids])):
        assert tokenizer(text)["input_ids"] == want
        ours = JetStreamTokenizer(tokenizer, EOS)
        padded, count = ours.encode(text, max_prefill_length=64, jax_padding=False)
        assert padded[:count].tolist() == want and len(padded) == 32
        assert ours.encode(text, is_bos=False)[1] == len(ids)
        assert token_utils.pad_tokens(ids, ours.bos_id, ours.pad_id)[1] == len(ids)
        parts = [ours.decode([token]) for token in want]
        assert token_utils.text_tokens_to_str(parts) == text != "".join(tokenizer.decode([token]) for token in want)
        assert [token_utils.is_byte_token(part) for part in parts[-6:]] == [True, False] + [True] * 4


def test_a_failure_is_seen_and_kills_nobody(greedy, monkeypatch, caplog):
    def fail(*args, **options):
        raise RuntimeError("on purpose")

    it = orchestrator.Driver([greedy], [greedy], [greedy.weights], [greedy.weights], interleaved_mode=True)
    monkeypatch.setattr(greedy, "prefill", fail)

    async def wait_for_the_end():
        call = asyncio.create_task(anext(orchestrator.LLMOrchestrator(it).Decode(request(PROMPTS[0]))))
        while it.live:
            await asyncio.sleep(0.01)
        call.cancel()

    asyncio.run(wait_for_the_end())
    it.stop()
    assert "prefill-0 has failed" in caplog.text and "on purpose" in caplog.text


def test_importing_jetstream_leaves_the_process_as_it_was():
    code = """if True:
        import logging, sys, jax
        root = logging.getLogger()
        before = root.level, list(root.handlers), hasattr(jax, "tree_map")
        from jrl.rollout.jetstream import compat
        after = root.level, list(root.handlers), hasattr(jax, "tree_map")
        assert after == before, (before, after)
        assert "seqio" not in sys.modules and compat.orchestrator.JetThread is compat.DriverThread
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "--model"),
        (["--model=random:tiny", "--prot=1"], "--prot=1"),
        (["--model=random:tiny", "--slots=0"], "--slots=0: must be at least 1"),
        (["--model=random:tiny", "--port=70000"], "--port=70000"),
        (["--model=random:tiny", "--kv=int4"], "--kv=int4: must be same or int8"),
        (["--model=random:tiny", "--unroll_layers=yes"], "--unroll_layers=yes: must be auto, on or off"),
        (["--model=random:tiny", "--port=0", "--max_prefill_length=48"], "power of two"),
        (["--model=random:tiny", "--port=0", "--max_tokens=4000"], "2048"),
        (["--model=random:tiny", "--port=0", "--replica=9"], "--replica=9"),
        (["--model=random:tiny", "--port=0", "--replica=2", "--prefill_replica=2"], "--prefill_replica=2"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_status_2(args, part, capsys):
    assert jetstream_serve.main(args) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and part in error


@pytest.mark.parametrize("found", [None, "0.2.1"])
def test_a_package_that_is_missing_is_one_line_with_the_remedy(found, capsys, monkeypatch):
    def version(name):
        if found is None:
            raise compat.importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(compat.importlib.metadata, "version", version)
    for name in ("compat", "server"):
        monkeypatch.delitem(sys.modules, f"jrl.rollout.jetstream.{name}")
    assert jetstream_serve.main(["--model=random:tiny"]) == 2
    assert f"pip install --no-deps {PINNED}" in capsys.readouterr().err.strip().splitlines()[-1]


def test_sigterm_ends_the_server_in_order():
    options = ["--model=random:tiny", "--port=0", "--replica=1", "--page_size=512", "--slots=1", "--grace_s=0"]
    command = [sys.executable, "-m", "jrl.rollout.jetstream_serve", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        address = next(m[1] for line in process.stderr if (m := re.search(r"served on (\S+),", line)))
        with grpc.insecure_channel(address) as channel:
            responses = jetstream_pb2_grpc.OrchestratorStub(channel).Decode(request("x", 1000), timeout=60)
            assert next(responses).stream_content.samples
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError):
                list(responses)
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


def test_lengths_by_default():
    settings = flags.parse(["--model=random:tiny"])
    arch = dataclasses.replace(ARCH, max_position=100)
    assert flags.make_lengths(settings, arch) == (100, 32) and flags.make_lengths(settings, ARCH) == (2048, 1024)
