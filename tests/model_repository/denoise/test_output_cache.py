import asyncio

from output_cache import OutputCache


class Counts:
    def __init__(self):
        self.hits = self.misses = self.evictions = self.bytes = 0

    def hit(self, count):
        self.hits += count

    def miss(self, count):
        self.misses += count

    def evicted(self, count):
        self.evictions += count

    def set_bytes(self, size):
        self.bytes = size


class Computer:
    """Makes `x` * 2 for every key `x`, and counts."""

    def __init__(self, fail=False, delay=0.0):
        self.calls, self.fail, self.delay = [], fail, delay

    async def __call__(self, keys):
        self.calls.append(list(keys))
        await asyncio.sleep(self.delay)
        if self.fail:
            raise RuntimeError("the engine failed")
        return [key * 2 for key in keys]


def new_cache(max_bytes=100):
    counts = Counts()
    return OutputCache(max_bytes, len, counts), counts


def test_a_repeated_key_is_not_computed_again():
    async def scenario():
        cache, counts = new_cache()
        compute = Computer()
        assert await cache.get_many(["a"], compute) == (["aa"], 1)
        assert await cache.get_many(["a"], compute) == (["aa"], 0)
        assert compute.calls == [["a"]]
        assert (counts.hits, counts.misses, counts.bytes) == (1, 1, 2)

    asyncio.run(scenario())


def test_order_and_repeats_are_kept_and_missing_keys_come_in_one_call():
    async def scenario():
        cache, _ = new_cache()
        compute = Computer()
        await cache.get_many(["b"], compute)
        values, computed = await cache.get_many(["c", "b", "a", "c"], compute)
        assert values == ["cc", "bb", "aa", "cc"]
        assert computed == 2
        assert compute.calls == [["b"], ["c", "a"]]

    asyncio.run(scenario())


def test_simultaneous_equal_keys_are_computed_once():
    async def scenario():
        cache, _ = new_cache()
        compute = Computer(delay=0.02)
        results = await asyncio.gather(*(cache.get_many(["a", "b"], compute) for _ in range(8)))
        assert all(values == ["aa", "bb"] for values, _ in results)
        assert compute.calls == [["a", "b"]]

    asyncio.run(scenario())


def test_a_failure_reaches_everyone_and_leaves_nothing_behind():
    async def scenario():
        cache, counts = new_cache()
        failing = Computer(fail=True, delay=0.01)
        results = await asyncio.gather(
            *(cache.get_many(["a"], failing) for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(result, RuntimeError) for result in results)
        assert len(failing.calls) == 1
        assert (len(cache), cache.bytes, counts.bytes) == (0, 0, 0)
        assert await cache.get_many(["a"], Computer()) == (["aa"], 1)

    asyncio.run(scenario())


def test_a_cancelled_task_does_not_stop_the_computation():
    async def scenario():
        cache, _ = new_cache()
        compute = Computer(delay=0.05)
        first = asyncio.create_task(cache.get_many(["a"], compute))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(cache.get_many(["a"], compute))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == (["aa"], 0)
        assert len(compute.calls) == 1

    asyncio.run(scenario())


def test_the_bound_holds_and_the_least_recently_used_goes_first():
    async def scenario():
        cache, counts = new_cache(max_bytes=6)
        compute = Computer()
        for key in "abc":
            await cache.get_many([key], compute)
        await cache.get_many(["a"], compute)  # now b is the oldest
        await cache.get_many(["d"], compute)
        assert counts.evictions == 1
        calls = len(compute.calls)
        await cache.get_many(["a", "c", "d"], compute)
        assert len(compute.calls) == calls
        await cache.get_many(["b"], compute)
        assert compute.calls[-1] == ["b"]

    asyncio.run(scenario())


def test_the_bound_holds_under_a_thousand_keys():
    async def scenario():
        cache, counts = new_cache(max_bytes=64)
        compute = Computer()
        for number in range(1000):
            await cache.get_many([str(number)], compute)
            assert cache.bytes <= 64
            assert cache.bytes == counts.bytes
        assert counts.misses == 1000
        assert counts.evictions == 1000 - len(cache)

    asyncio.run(scenario())


def test_a_value_beyond_the_bound_is_returned_and_not_stored():
    async def scenario():
        cache, _ = new_cache(max_bytes=4)
        compute = Computer()
        await cache.get_many(["a"], compute)
        assert await cache.get_many(["long"], compute) == (["longlong"], 1)
        assert len(cache) == 1
        assert await cache.get_many(["a"], compute) == (["aa"], 0)

    asyncio.run(scenario())
