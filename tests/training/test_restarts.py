"""Ranks that torchrun starts again share keys with one another, and none with the ranks before them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tastemaker.training import distributed

TIMEOUT = timedelta(seconds=60)
WORLD_SIZE = 3


@pytest.fixture
def agent_store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store of torchrun's agent, which outlives its ranks; here, ranks are threads."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**variables, "WORLD_SIZE": str(WORLD_SIZE)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "get_rank", lambda: int(threading.current_thread().name.rpartition("_")[2]))
    return store


def start_ranks() -> list[set[str]]:
    """Let each rank write a key and read those of all others; return the keys that it finds in its store."""
    barrier = threading.Barrier(WORLD_SIZE)

    def join() -> set[str]:
        barrier.wait(60)  # so that each thread of the pool is one rank
        with distributed._store_of_this_attempt(TIMEOUT) as arguments:
            store, rank = arguments["store"], arguments["rank"]
            assert not store.check([f"address/{rank}"]), "the address of an earlier rank"
            assert arguments["world_size"] == WORLD_SIZE
            store.set(f"address/{rank}", "here")
            for other in range(WORLD_SIZE):
                assert store.get(f"address/{other}") == b"here"
            barrier.wait(60)
            return {f"{rank}: {store.get(f'address/{rank}').decode()}"}

    with ThreadPoolExecutor(WORLD_SIZE, thread_name_prefix="rank") as pool:
        return [each.result(120) for each in [pool.submit(join) for _ in range(WORLD_SIZE)]]


def test_restarted_ranks_find_no_keys_of_earlier_ones(agent_store: dist.TCPStore) -> None:
    for _ in range(3):
        assert {name for found in start_ranks() for name in found} == {f"{rank}: here" for rank in range(WORLD_SIZE)}


def test_rank_that_was_killed_while_it_asked_delays_nobody(agent_store: dist.TCPStore) -> None:
    agent_store.add(distributed.REQUESTS, 1)  # announced, and not written
    agent_store.set(f"{distributed.REQUESTS}/{agent_store.add(distributed.REQUESTS, 1)}", "of a rank that is dead")
    assert len(start_ranks()) == WORLD_SIZE


def test_without_an_agent_the_store_is_that_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with distributed._store_of_this_attempt(TIMEOUT) as arguments:
        assert arguments == {}
