import asyncio

import pytest

from admission import Admission
from generation import Cancelled, StopSignal, Unavailable


def never():
    return StopSignal(timeout_ms=60_000)


async def hold(admission, stop, order, name, release):
    async with admission.place(stop):
        order.append(name)
        await release.wait()


def test_places_then_a_queue_in_order_then_refusal():
    async def scenario():
        loads = []
        admission = Admission(2, 3, lambda *load: loads.append(load))
        order, release = [], asyncio.Event()
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(hold(admission, never(), order, number, release)))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert order == [0, 1]
        assert loads[-1] == (2, 3)
        with pytest.raises(Unavailable, match="2 requests are running and 3 are waiting"):
            async with admission.place(never()):
                pass
        release.set()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3, 4]
        assert loads[-1] == (0, 0)

    asyncio.run(scenario())


def test_a_waiting_request_ends_at_its_deadline_and_frees_its_place_in_the_queue():
    async def scenario():
        loads = []
        admission = Admission(1, 1, lambda *load: loads.append(load))
        order, release = [], asyncio.Event()
        running = asyncio.create_task(hold(admission, never(), order, "first", release))
        await asyncio.sleep(0.01)
        with pytest.raises(Cancelled, match="deadline of 100 ms exceeded"):
            await hold(admission, StopSignal(timeout_ms=100), order, "late", release)
        assert loads[-1] == (1, 0)
        release.set()
        await running
        assert order == ["first"]
        assert loads[-1] == (0, 0)

    asyncio.run(scenario())


def test_a_waiting_request_can_be_cancelled():
    async def scenario():
        admission = Admission(1, 1, lambda *load: None)
        order, release, stop = [], asyncio.Event(), never()
        running = asyncio.create_task(hold(admission, never(), order, "first", release))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(hold(admission, stop, order, "second", release))
        await asyncio.sleep(0.01)
        stop.cancel()
        with pytest.raises(Cancelled):
            await waiting
        release.set()
        await running

    asyncio.run(scenario())


def test_a_place_that_comes_together_with_the_cancellation_is_passed_on():
    async def scenario():
        loads = []
        admission = Admission(1, 2, lambda *load: loads.append(load))
        order, release = [], asyncio.Event()
        running = asyncio.create_task(hold(admission, never(), order, "first", release))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(hold(admission, never(), order, "second", release))
        await asyncio.sleep(0.01)
        release.set()
        await asyncio.sleep(0)  # "first" leaves: the place is handed to "second"...
        second.cancel()  # ...which is cancelled before it wakes
        await asyncio.gather(running, second, return_exceptions=True)
        assert loads[-1] == (0, 0)
        async with admission.place(never()):
            pass

    asyncio.run(scenario())


def test_an_error_frees_the_place():
    async def scenario():
        admission = Admission(1, 0, lambda *load: None)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                async with admission.place(never()):
                    raise RuntimeError

    asyncio.run(scenario())
