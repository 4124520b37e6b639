"""The engine's thread: news, deadlines, refusals, the end."""

import asyncio

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rollout.scheduler import Request
from jrl.rollout.service import DeadlineExceeded, EngineFailed, Service, Unavailable
from jrl.serve.backend import Backend
from tests.serving import WIDE


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
