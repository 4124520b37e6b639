"""The engine's thread: news, deadlines, refusals, the end."""

import asyncio
import dataclasses
import json
import logging
import threading

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rollout.scheduler import Request
from jrl.rollout.service import DeadlineExceeded, EngineFailed, Service, Unavailable
from jrl.rollout.sizes import FewSizes, FineSizes
from jrl.serve.app import Api
from jrl.serve.backend import Backend
from jrl.serve.metrics import ServerMetrics
from tests.serving import WIDE, wait_for


@pytest.fixture(scope="module")
def engine():
    return Backend(WIDE).make_engine()


def service_run(engine, act):
    """Runs `act(service)` on an event loop against a service over this engine."""

    async def go():
        service = Service(lambda: engine)
        service.start()
        while service.status == "loading":
            await asyncio.sleep(0.01)
        try:
            return await asyncio.wait_for(act(service), 60)
        finally:
            service.stop(0)
            assert service.join(30)

    return asyncio.run(go())


def request(max_new_tokens=70, **options):
    return Request(np.arange(3, 20, dtype=np.int32), 2, max_new_tokens, 1.0, 0, True, **options)


async def all_news(service, asked, stream=False):
    return [news async for news in service.submit([asked], stream).news()]


def test_news_are_kept_for_who_comes_late(engine):
    async def act(service):
        job = service.submit([request(8)], False)
        while service.waiting or not engine.idle:
            await asyncio.sleep(0.01)
        return [c async for c in job.news()]

    assert [len(c.tokens) for c in service_run(engine, act)] == [8, 8]


def test_a_request_out_of_time_is_given_up(engine):
    async def act(service):
        with pytest.raises(DeadlineExceeded):
            await all_news(service, request(deadline_s=0.0))
        return await all_news(service, request(8, deadline_s=60.0))

    assert [len(c.tokens) for c in service_run(engine, act)] == [8, 8]
    assert engine.idle


def test_a_request_that_can_never_run_is_refused_alone(engine):
    async def act(service):
        with pytest.raises(UserError, match="96 tokens"):
            await all_news(service, request(1000))
        return await all_news(service, request(8), stream=True)

    assert sum(len(c.tokens) for c in service_run(engine, act)) == 16


def test_the_end_comes_after_what_is_under_way_or_after_the_time_of_grace(engine):
    async def act(service, grace_s):
        job = service.submit([request()], True)
        news = job.news()
        await anext(news)
        service.stop(grace_s)
        while service.status == "ok":
            await asyncio.sleep(0.001)
        with pytest.raises(Unavailable, match="shutting down"):
            service.submit([request()], False)
        return [c async for c in news]

    parts = service_run(engine, lambda service: act(service, 60))
    assert sum(c.stop_reason == "length" for c in parts) == 2
    with pytest.raises(Unavailable, match="shutting down"):
        service_run(engine, lambda service: act(service, 0))
    engine.abort()
    assert engine.idle


def test_a_service_without_an_engine_refuses():
    async def act():
        service = Service(lambda: 1 / 0)
        service.start()
        assert await asyncio.to_thread(service.join, 30)
        with pytest.raises(EngineFailed):
            service.submit([request()], False)

    asyncio.run(act())


class Warming:
    """A warm-up of five programs, each compiled when it may be."""

    def __init__(self, monkeypatch):
        self.compiled, self.may = 0, threading.Semaphore(0)
        monkeypatch.setattr("jrl.rollout.service.warm_up", self.run)

    def run(self, engine):
        assert isinstance(engine.sizes, FewSizes)
        for self.compiled in range(1, 6):
            self.may.acquire()
            yield self.compiled, 5


FEW = dataclasses.replace(WIDE, warm_up_s=60.0)


@pytest.fixture(scope="module")
def few():
    return Backend(FEW).make_engine()


def test_nothing_is_accepted_before_the_warm_up_is_over(few, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "jrl")
    warming = Warming(monkeypatch)
    service = Service(lambda: few, warm_up_s=60)
    api = Api(service, ServerMetrics(lambda: service.snapshot), "tiny", lambda: None, 1000)
    service.start()
    warming.may.release(2)
    wait_for(lambda: service.warmed_up == (2, 5))
    response = asyncio.run(api.health())
    body = json.loads(response.body)
    assert response.status_code == 503 and body["status"] == "loading" and body["warm_up"] == {"compiled": 2, "programs": 5}
    with pytest.raises(Unavailable):
        asyncio.run(all_news(service, request(8)))
    warming.may.release(3)
    wait_for(lambda: service.status == "ok")
    assert asyncio.run(api.health()).status_code == 200 and "warm-up: 5 of 5 programs" in caplog.text
    service.stop(0)
    assert service.join(30)


@pytest.mark.parametrize("why", ["time", "end"])
def test_a_warm_up_ends_early_when_time_is_up_or_the_service_ends(why, few, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "jrl")
    warming = Warming(monkeypatch)
    service = Service(lambda: few, warm_up_s=1e-9 if why == "time" else 60)
    service.start()
    if why == "end":
        service.stop(0)
    warming.may.release(5)
    wait_for(lambda: service.status == ("ok" if why == "time" else "stopping"))
    assert warming.compiled == 1 and "the other 4 are compiled when a request needs them" in caplog.text
    service.stop(0)
    assert service.join(30)


def test_an_engine_that_is_not_warmed_up_has_sizes_that_fit_closely(engine):
    assert isinstance(engine.sizes, FineSizes)
