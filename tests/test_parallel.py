"""Results come in order, errors come through, and torch is left as it was."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import TIMEOUT

from atlas_cli.parallel import MemoryBudget, ThreadPool, in_order, resident


def test_results_come_in_the_order_of_the_items():
    def slow_first(number: int) -> int:
        time.sleep(0.02 * (3 - number))
        return number * number

    assert list(in_order(slow_first, range(4), workers=4)) == [0, 1, 4, 9]


def test_a_worker_has_one_thread_and_torch_keeps_its_own():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert list(in_order(lambda _: torch.get_num_threads(), "ab")) == [1, 1]
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_the_threads_of_a_pool_keep_one_core_while_others_have_more():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with ThreadPool(2) as pool:
        torch.set_num_threads(2)
        assert pool.map(lambda _: torch.get_num_threads(), "ab") == [1, 1]
        assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_one_thread_hands_its_work_to_another_only_where_torch_has_more_cores():
    before = torch.get_num_threads()
    with ThreadPool(1) as pool:
        for cores, at_home in ((1, True), (2, False)):
            torch.set_num_threads(cores)
            workers = pool.map(lambda _: threading.current_thread(), "ab")
            assert [one is threading.current_thread() for one in workers] == [at_home] * 2
            assert pool.map(lambda _: torch.get_num_threads(), "ab") == [1, 1]
    torch.set_num_threads(before)


def test_an_error_stops_the_work():
    done = []

    def fail(number: int) -> None:
        done.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        list(in_order(fail, range(1000), workers=1))
    assert len(done) < 1000


def test_memory_is_counted_in_pages_of_the_size_that_the_system_has(monkeypatch):
    sizes = {"SC_PAGE_SIZE": 65536}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    monkeypatch.setattr(Path, "read_text", lambda path: "900 7 3 1 0 2 0\n")
    assert resident() == 7 * 65536


@pytest.mark.parametrize("total", [10, -5])
def test_whoever_wants_more_memory_than_there_is_works_alone(total: int):
    budget, working, most = MemoryBudget(total), [], []

    def work(_: int) -> None:
        with budget.take(20):
            working.append(1)
            most.append(len(working))
            time.sleep(0.01)
            working.pop()

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT / 10)
    assert most == [1, 1, 1]
