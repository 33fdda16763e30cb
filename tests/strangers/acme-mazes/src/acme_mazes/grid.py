"""Mazes themselves: made from a seed, solved by breadth first."""

from __future__ import annotations

import random
from collections import deque

MOVES = {"N": (0, -1), "E": (1, 0), "S": (0, 1), "W": (-1, 0)}


def make(seed: str, size: int) -> list[str]:
    """Return the rows of a maze that has a way."""
    draw = random.Random(seed)
    while True:
        cells = [["#" if draw.random() < 0.3 else "." for _ in range(size)] for _ in range(size)]
        cells[0][0], cells[-1][-1] = "S", "G"
        rows = ["".join(row) for row in cells]
        if shortest(rows):
            return rows


def shortest(rows: list[str]) -> str:
    """Return the moves of a shortest way from S, at the top left, to G; "" when there is none."""
    seen, open_ways = {(0, 0)}, deque([((0, 0), "")])
    while open_ways:
        (x, y), way = open_ways.popleft()
        if rows[y][x] == "G":
            return way
        for move, (dx, dy) in MOVES.items():
            place = (x + dx, y + dy)
            inside = 0 <= place[0] < len(rows[0]) and 0 <= place[1] < len(rows)
            if inside and place not in seen and rows[place[1]][place[0]] != "#":
                seen.add(place)
                open_ways.append((place, way + move))
    return ""
