"""pyclient.Session under asyncio: many generations in one thread, cancelled with their tasks."""

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest

from conftest import clean_environment
from pyclient import AsyncStream, InvalidArgument, Session, Token

PROMPT = "def add(a, b):\n"
ENDLESS = {"max_tokens": 3500, "ignore_eos": True, "speculate": "off"}


def idle(session, seconds=5.0):
  """Waits until nothing runs; False when something still does after `seconds`."""
  end = time.monotonic() + seconds
  while session.health().running or session.health().waiting:
    if time.monotonic() > end:
      return False
    time.sleep(0.005)
  return True


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5, "stop": "\n\n"}])
def test_it_equals_the_blocking_calls(session, options):
  whole = session.generate(PROMPT, max_tokens=40, **options)

  async def work():
    stream = session.astream(PROMPT, max_tokens=40, **options)
    assert isinstance(stream, AsyncStream)
    with pytest.raises(RuntimeError, match="still runs"):
      stream.result
    tokens = [token async for token in stream]
    assert [token async for token in stream] == []
    return tokens, stream.result, await session.agenerate(PROMPT, max_tokens=40, **options)

  tokens, streamed, generated = asyncio.run(work())
  assert all(isinstance(token, Token) for token in tokens)
  assert "".join(token.text for token in tokens) == whole.text
  for result in (streamed, generated):
    assert (result.token_ids, result.text, result.finish_reason, result.stop_reason) == \
      (whole.token_ids, whole.text, whole.finish_reason, whole.stop_reason)


def test_many_at_once_need_no_threads(session):
  jobs = [(f"def f{i}(x):\n", {"max_tokens": 16, "temperature": 0.8 * (i % 2), "seed": i, "ignore_eos": True})
          for i in range(80)]
  alone = [session.generate(prompt, speculate="off", **options).token_ids for prompt, options in jobs]

  async def work():
    before = threading.active_count()
    tasks = [asyncio.create_task(session.agenerate(prompt, **options)) for prompt, options in jobs]
    ticks = 0
    while not all(task.done() for task in tasks):
      await asyncio.sleep(0.001)
      ticks += 1
    assert threading.active_count() == before
    assert ticks > 3
    return [task.result().token_ids for task in tasks]

  assert asyncio.run(work()) == alone


def test_n_choices(session):
  options = {"max_tokens": 10, "ignore_eos": True, "temperature": 1.0, "seed": 4}
  assert [result.token_ids for result in asyncio.run(session.agenerate(PROMPT, n=4, **options))] == \
    [result.token_ids for result in session.generate(PROMPT, n=4, **options)]


@pytest.mark.parametrize("work", ["generate", "n", "stream", "chat"])
def test_cancelling_the_task_cancels_the_generation(session, work):
  async def endless():
    if work == "generate":
      await session.agenerate(PROMPT, **ENDLESS)
    elif work == "n":
      await session.agenerate(PROMPT, n=3, **ENDLESS)
    elif work == "chat":
      await session.achat([{"role": "user", "content": "hi"}], **ENDLESS)
    else:
      async for _ in session.astream(PROMPT, **ENDLESS):
        pass

  async def main():
    task = asyncio.create_task(endless())
    while not session.health().running:
      await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    with pytest.raises(TimeoutError):
      await asyncio.wait_for(endless(), 0.05)

  asyncio.run(main())
  assert idle(session)


def test_leaving_the_block_or_dropping_the_stream_cancels(session):
  async def main():
    async with session.astream(PROMPT, **ENDLESS) as stream:
      async for token in stream:
        assert token.id is not None
        break
    assert stream.result.finish_reason == "cancelled" and 1 <= len(stream.result.token_ids) < 3500
    assert [token async for token in stream] == []
    stream = session.astream(PROMPT, **ENDLESS)
    await anext(stream)
    del stream
    stream = session.astream(PROMPT, **ENDLESS)
    stream.cancel()
    assert (await stream.finish()).finish_reason == "cancelled"

  asyncio.run(main())
  assert idle(session)


def test_one_task_at_a_time():
  async def main(busy):
    stream = busy.astream(PROMPT, max_tokens=2, ignore_eos=True)
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.05)
    with pytest.raises(RuntimeError, match="one at a time"):
      await anext(stream)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
      await first
    assert (await stream.finish()).finish_reason == "cancelled"

  # The stream waits behind another, so its first token does not come.
  with Session(threads=1, max_streams=1) as busy, busy.stream(PROMPT, **ENDLESS):
    asyncio.run(main(busy))


def test_errors_come_at_once(session):
  with pytest.raises(InvalidArgument, match="top_p"):
    session.astream(PROMPT, top_p=2.0)
  with pytest.raises(InvalidArgument, match="top_p"):
    asyncio.run(session.agenerate(PROMPT, top_p=2.0))


def test_closing_the_session_ends_what_tasks_wait_for():
  opened = Session(threads=1)

  async def main():
    task = asyncio.create_task(opened.agenerate(PROMPT, **ENDLESS))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(opened.close)
    return await task

  assert asyncio.run(main()).finish_reason == "cancelled"


def test_ctrl_c_ends_an_asyncio_program():
  program = ("import asyncio\n"
             "from pyclient import Session\n"
             "session = Session(threads=1)\n"
             "async def main():\n"
             "  print('started', flush=True)\n"
             f"  await session.agenerate({PROMPT!r}, **{ENDLESS!r})\n"
             "try:\n"
             "  asyncio.run(main())\n"
             "except KeyboardInterrupt:\n"
             "  print(session.generate('x', max_tokens=2, ignore_eos=True).finish_reason)\n")
  with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                        env=clean_environment()) as process:
    assert process.stdout.readline() == "started\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
  assert (process.returncode, out, err) == (0, "length\n", "")
