"""Poll-based coroutines run only when polled."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from farm.campaign.verify.coroutines import Loop, done, until


def test_a_coroutine_goes_on_once_what_it_waits_for_is_there() -> None:
    """It goes to its first wait at once, and from there as far as it can when the loop looks again."""
    loop, promise, said = Loop(), Future[str](), list[str]()

    async def listen() -> None:
        said.append("began")
        said.append(await done(promise))
        said.append(await until(lambda: said[-1] == "heard" and "found"))

    loop.start(listen())
    loop.run()
    assert said == ["began"]
    promise.set_result("heard")
    assert said == ["began"]
    loop.run()
    loop.run()
    assert said == ["began", "heard", "found"]


def test_what_one_does_lets_others_go_on() -> None:
    """A coroutine resumes in the run in which its predicate becomes true, and may start a third."""
    loop, did = Loop(), list[str]()

    async def do(name: str, after: str, then: Coroutine[Any, Any, None] | None = None) -> None:
        await until(lambda: not after or after in did)
        did.append(name)
        if then is not None:
            loop.start(then)

    loop.start(do("last", "middle"))
    loop.start(do("middle", "first"))
    loop.start(do("opener", "", do("first", "opener")))
    loop.run()
    assert did == ["opener", "first", "middle", "last"]


def test_a_coroutine_that_is_closed_cleans_up_and_is_resumed_no_more() -> None:
    """Its `finally` clauses run, those of what it awaits first; answers that come later change nothing."""
    loop, promise, said = Loop(), Future[str](), list[str]()

    async def ask() -> None:
        try:
            said.append(await done(promise))
        finally:
            said.append("inner")

    async def work() -> None:
        try:
            await ask()
        finally:
            said.append("outer")

    job = loop.start(work())
    job.close()
    promise.set_result("late")
    loop.run()
    assert said == ["inner", "outer"]
