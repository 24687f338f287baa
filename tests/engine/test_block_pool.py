import pytest

from gapless.engine.block_pool import BlockPool


def test_every_block_is_given_out_once():
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    assert not pool.can_allocate(1)
    assert pool.can_allocate(0)


def test_the_block_freed_last_comes_first():
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    pool.free(blocks)
    assert pool.allocate(3) == blocks  # their memory is already touched


def test_untouched_blocks_stay_untouched():
    pool = BlockPool(100)
    for _ in range(50):
        pool.free(pool.allocate(2))
    assert max(pool.allocate(2)) == 1


def test_freeing_twice_is_caught():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError):
        pool.free(blocks)
