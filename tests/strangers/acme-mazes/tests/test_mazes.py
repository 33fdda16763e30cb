"""What Rollhook asks of environments, and what is special about mazes."""

import pytest
from acme_mazes import MazesConfig, grid
from acme_mazes.mazes import Mazes

from rollhook.environment import Transcript
from rollhook.messages import message
from rollhook.testing.boxes import open_box_with
from rollhook.testing.environment import EnvironmentContract, build_context, entered


def mazes():
    return Mazes(MazesConfig(count=3), build_context())


class TestMazes(EnvironmentContract):
    task_limit = 2

    @pytest.fixture
    def make_environment(self):
        return mazes

    @pytest.fixture
    def open_box(self, tmp_path):
        return open_box_with("local", tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_a_maze_has_a_way(seed):
    rows = grid.make(str(seed), 5)
    assert 8 <= len(grid.shortest(rows)) <= 24


async def test_a_way_through_a_wall_is_wrong_and_talk_is_not_free(tmp_path):
    environment = mazes()
    task = environment.tasks("train")[0]
    async with entered(environment, task, open_box_with("local", tmp_path)) as phases:
        _, walk = [phase async for phase in phases]
        await walk.sandbox.write("way.txt", b"W")
        wrong = await walk.verify(Transcript([message("assistant", "x" * 200)], "done"))
        assert (wrong.reward, wrong.components) == (0.05, {"right": 0.0, "brevity": 0.5})
        await walk.solve()
        right = await walk.verify(Transcript([message("assistant", "x" * 200)], "done"))
        assert right.reward == pytest.approx(0.95)
