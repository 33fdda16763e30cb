"""The workload of turn_cost.py in verifiers 0.4.0: `turns_verifiers.py CONVERSATIONS TURNS URL`.

Its own taskset, a harness whose loop is in the process, and its interception server between that loop and
the engine. Runs with the Python of an environment that holds verifiers alone.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import httpx
import verifiers.v1 as vf

__all__ = ["TalkHarness", "TalkTaskset"]

ASK = "What comes next? Think about it and answer in one line."
TURNS = int(sys.argv[2])


class TalkTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def one(self) -> float:
        return 1.0


class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self):
        yield TalkTask(vf.TaskData(prompt=ASK), self.config.task)


class TalkHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    client = None

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        url = endpoint.rstrip("/") + "/chat/completions"
        headers = {"Authorization": f"Bearer {secret}"}
        messages = [{"role": "user", "content": ASK}]
        for _ in range(TURNS):
            body = {"model": "mock", "messages": messages}
            answer = await shared().post(url, json=body, headers=headers)
            answer.raise_for_status()
            said = answer.json()["choices"][0]["message"]
            messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": ASK}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def shared():
    if TalkHarness.client is None:
        TalkHarness.client = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None))
    return TalkHarness.client


async def run(count, url):
    name = Path(__file__).stem
    config = vf.SingleAgentEnvConfig(
        taskset={"id": name}, agent={"harness": {"id": name}, "runtime": {"type": "subprocess"}}
    )
    env = vf.SingleAgentEnv(config)
    ctx = vf.ModelContext(
        model="mock", client=vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="NONE"), sampling={}
    )
    (task,) = list(env.taskset)
    async with env.serving():
        warm = [env.run_slot(slot, ctx) for slot in env.slots(task, 4)]
        await asyncio.gather(*warm)
        wall, cpu = time.perf_counter(), time.process_time()
        episodes = await asyncio.gather(*(env.run_slot(slot, ctx) for slot in env.slots(task, count)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    for episode in episodes:
        assert episode.ok, episode.errors or episode.traces[0].errors
    print(json.dumps({"wall": wall / count / TURNS * 1e3, "cpu": cpu / count / TURNS * 1e3}))


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[3]))
