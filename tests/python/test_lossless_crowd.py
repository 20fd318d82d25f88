"""32 streams at once, of every mode and sampling: each has the ids that it has alone without speculation.

With KDTREE_TEST_FULL=1 over 10,240 tokens; otherwise over 768. KDTREE_TEST_TP: on so many ranks.
"""

import concurrent.futures
import os
import threading

from conftest import FULL
from pyclient import Session
from test_lossless import MODES, PROMPTS, SAMPLINGS

STREAMS = 32
RANKS = int(os.environ.get("KDTREE_TEST_TP", "1"))
N_TOKENS = 320 if FULL else 24


def test_32_streams_of_all_kinds_equal_each_alone():
  modes = list(MODES)
  jobs = [(PROMPTS[i % len(PROMPTS)]["ids"], list(SAMPLINGS.values())[i % len(SAMPLINGS)], MODES[modes[i % len(modes)]])
          for i in range(STREAMS)]
  begin = threading.Barrier(STREAMS)

  def together(job):
    ids, sampling, mode = job
    begin.wait()
    return session.generate(ids, max_tokens=N_TOKENS, ignore_eos=True, **sampling, **mode).token_ids

  with Session(max_streams=STREAMS, tp=RANKS) as session:
    alone = [session.generate(ids, max_tokens=N_TOKENS, ignore_eos=True, speculate="off", **sampling).token_ids
             for ids, sampling, _ in jobs]
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
      crowd = list(pool.map(together, jobs))
    drafted = session.stats()["spec_decode_num_draft_tokens_total"]
  assert [len(ids) for ids in alone] == [N_TOKENS] * STREAMS
  assert crowd == alone
  assert drafted > 0
