"""Pools of threads: work is done once, is cancelled with the pool, and needs no thread."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from enum import Enum, auto

import pytest

from unickpt.threads import Events, Pool, SerialExecutor, Ticker, calling_user


def test_work_that_a_closed_pool_has_not_begun_is_cancelled() -> None:
    """Whoever waits for it would wait for ever."""
    begun, go = threading.Event(), threading.Event()
    pool = Pool(1)

    def first() -> int:
        begun.set()
        go.wait(60)
        return 1

    running, waiting = pool.submit(first), pool.submit(lambda: 2)
    assert begun.wait(60)
    pool.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(CancelledError):
        waiting.result(60)
    go.set()
    assert running.result(60) == 1


def test_without_threads_the_caller_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    me = threading.get_ident()
    assert Pool(0).submit(threading.get_ident).result() == me
    calls = list[int]()

    def refuse(self: ThreadPoolExecutor, work: object, *arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    with Pool(2) as pool:
        assert pool.submit(calls.append, 1).result() is None
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 // 0).result()
    assert calls == [1], "done once"


def test_whoever_waits_for_work_does_what_no_thread_has_begun() -> None:
    begun, go = threading.Event(), threading.Event()

    def first() -> int:
        begun.set()
        assert go.wait(60)
        return threading.get_ident()

    def last() -> int:
        go.set()
        return threading.get_ident()

    with Pool(1) as pool:
        one, other = pool.submit(first), pool.submit(last)
        assert begun.wait(60)
        assert pool.result(one) != threading.get_ident()
        assert pool.result(other) == threading.get_ident()
        assert pool.submit(last).result(60) != threading.get_ident(), "its thread goes on"


def test_an_interrupt_of_whoever_helps_is_raised_at_once() -> None:
    begun, go = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go.wait(60)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with Pool(1) as pool:
        one, other = pool.submit(first), pool.submit(interrupted)
        assert begun.wait(60)
        with pytest.raises(KeyboardInterrupt):
            pool.result(one)
        go.set()
        assert one.result(60) is None
        assert other.done()


class Meal(Enum):
    COOKED = auto()
    EATEN = auto()


def test_events_wake_those_who_wait_for_them_only() -> None:
    events, woken = Events[Meal](), list[Meal]()

    def wait(meal: Meal) -> None:
        assert events.wait(meal, 60)
        woken.append(meal)

    waiting = {meal: threading.Thread(target=wait, args=(meal,)) for meal in Meal}
    for thread in waiting.values():
        thread.start()
    events.happened(Meal.EATEN)
    waiting[Meal.EATEN].join(60)
    assert woken == [Meal.EATEN]
    assert Meal.COOKED not in events
    assert not events.wait(Meal.COOKED, 0.01)
    events.happened(Meal.COOKED)
    waiting[Meal.COOKED].join(60)
    assert set(woken) == set(Meal)


def test_a_ticker_that_has_ticked_ticks_once_more_at_its_end() -> None:
    ticks, three = list[int](), threading.Event()
    ticker = Ticker("test ticks", 0.01, 0.01)

    def tick(number: int) -> None:
        ticks.append(number)
        if len(ticks) == 3:
            three.set()
            raise ValueError("its errors are ignored")

    ticker.start(tick)
    assert three.wait(60)
    ticker.close()
    count = len(ticks)
    assert count >= 4
    assert ticks[:4] == [0, 1, 2, 2], "a call that failed is counted again"
    silent = Ticker("test ticks", 60, 60)
    silent.start(ticks.append)
    silent.close()
    assert len(ticks) == count


def test_a_thread_does_not_wait_for_work_whose_user_function_waits_for_that_thread() -> None:
    errors = list[BaseException]()
    executor, ended = SerialExecutor("test", errors.append), threading.Event()

    def work() -> None:
        with calling_user:
            assert ended.wait(5)

    executor.add(work)
    executor.add(lambda: None)
    executor.wait(1)
    with calling_user:
        executor.wait()
    ended.set()
    executor.wait()
    assert errors == []


def test_work_that_is_added_again_before_it_begins_runs_once() -> None:
    runs, begun, ended = list[int](), threading.Event(), threading.Event()
    executor = SerialExecutor("test", lambda error: None)

    def first() -> None:
        begun.set()
        assert ended.wait(5)

    def work() -> None:
        runs.append(1)

    executor.add(first)
    assert begun.wait(5)
    executor.add(work)
    executor.add(work)
    ended.set()
    executor.wait()
    executor.add(work)
    executor.wait()
    assert runs == [1, 1]
