"""Pages of rows, and memory that grows without losing them."""

import numpy as np

from stages.runtime.embedding_store import PAGE_ROWS, RowPool


def filled(pool: RowPool, page: int, value: int) -> None:
    pool.rows[page * PAGE_ROWS : (page + 1) * PAGE_ROWS] = value


def test_pages_keep_their_rows_while_the_pool_grows() -> None:
    pool = RowPool(100)
    pages = []
    for number in range(1000):
        pages.append(pool.take())
        filled(pool, pages[-1], number % 251)
    assert len(set(pages)) == 1000
    for number, page in enumerate(pages):
        assert np.all(pool.rows[page * PAGE_ROWS : (page + 1) * PAGE_ROWS] == number % 251)
    assert pool.num_taken == 1000


def test_pages_that_were_given_back_are_used_before_the_pool_grows() -> None:
    pool = RowPool(8)
    capacity = len(pool.rows)
    for _ in range(50):
        pages = [pool.take() for _ in range(capacity // PAGE_ROWS)]
        pool.give_back(pages)
    assert len(pool.rows) == capacity
    assert pool.num_taken == 0
