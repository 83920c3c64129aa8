"""Threads of one processor each: results in order, errors and seconds as without them."""

import threading

import pytest
import torch

from fedshift.utils.profiling import record_seconds, timed_section
from fedshift.utils.threads import map_in_threads


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_come_in_the_order_of_the_items(threads):
    assert list(map_in_threads(lambda item: item * item, range(7), threads)) == [n * n for n in range(7)]


def test_work_is_done_by_several_threads_with_one_processor_each():
    barrier = threading.Barrier(2, timeout=20)  # passes only where two are inside at a time

    def work(_item):
        barrier.wait()
        return threading.get_ident(), torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        results = map_in_threads(work, range(4), 2)
        found = [next(results)]
        assert torch.get_num_threads() == 1  # more would wait for a processor that is busy
        found += results
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert len({thread for thread, _ in found}) == 2
    assert {count for _, count in found} == {1}


def test_an_error_is_raised_at_its_item_and_ends_the_rest():
    done = []

    def work(item):
        if item == 1:
            raise ValueError("item 1")
        done.append(item)
        return item

    found = map_in_threads(work, range(50), 2)
    assert next(found) == 0
    with pytest.raises(ValueError, match="item 1"):
        next(found)
    assert len(done) < 10


def test_no_more_than_one_item_for_each_thread_is_ahead():
    begun = []
    found = map_in_threads(lambda item: begun.append(item) or item, range(20), 2)
    next(found)
    found.close()
    assert len(begun) <= 3


def test_seconds_in_threads_are_counted():
    def work(_item):
        with timed_section("update"):
            pass

    with record_seconds() as seconds:
        list(map_in_threads(work, range(4), 2))
    assert seconds["update"] > 0
