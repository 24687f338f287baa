import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gapless.engine.request import Request, SequenceState
from gapless.engine.scheduler import Scheduler, SchedulerConfig
from gapless.errors import ContextLengthError
from gapless.sampling import SamplingParams


def request(num_prompt=8, max_tokens=8, n=1, seed=None):
    return Request("r", [1] * num_prompt, SamplingParams(n=n, seed=seed), max_tokens)


def scheduler(max_num_seqs=2, max_model_len=64, num_blocks=8):
    return Scheduler(SchedulerConfig(max_num_seqs, max_model_len, num_blocks))


def test_first_come_first_served():
    s = scheduler()
    requests = [request() for _ in range(3)]
    for r in requests:
        s.add(r)
    assert [q.request for q in s.admit()] == requests[:2]
    assert s.admit() == []
    s.finish(requests[0].sequences[0])
    (entering,) = s.admit()
    assert entering.request is requests[2]
    assert entering.slot == 0


def test_a_small_request_does_not_overtake_a_large_one():
    s = scheduler(max_num_seqs=4)
    first, large, small = request(32, 32), request(40, 40), request(1, 1)
    for r in (first, large, small):
        s.add(r)
    assert [q.request for q in s.admit()] == [first]
    s.finish(first.sequences[0])
    assert [q.request for q in s.admit()] == [large, small]


def test_blocks_grow_with_the_sequence_and_are_promised_from_the_start():
    s = scheduler(max_num_seqs=4, max_model_len=1024, num_blocks=40)
    r = request(16, 512)
    s.add(r)
    (sequence,) = s.admit()
    assert len(sequence.blocks) == 9  # prompt and look-ahead, not all 33
    other = request(16, 112)  # 8 blocks, but only 7 are not promised
    s.add(other)
    assert s.pool.num_free > 8
    assert s.admit() == []
    while s.wants_blocks(sequence) or sequence.num_tokens < 528:
        sequence.num_tokens += 1
        if s.wants_blocks(sequence):
            assert s.extend(sequence)
    assert len(sequence.blocks) == 33
    assert s.extend(sequence) == []


@pytest.mark.parametrize("num_prompt", [64, 65, 1000])
def test_a_prompt_that_can_never_fit_is_refused_with_numbers(num_prompt):
    with pytest.raises(ContextLengthError, match=rf"{num_prompt} tokens.*max_model_len is 64"):
        scheduler().check(request(num_prompt))
    scheduler().check(request(63, 1))


def test_choices_have_seeds_of_their_own():
    s = scheduler()
    first, second = request(n=3, seed=7), request(n=3, seed=7)
    s.add(first)
    s.add(second)
    seeds = [q.seed for q in first.sequences]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert [q.seed for q in second.sequences] == seeds
    assert request().choice_seeds() != request().choice_seeds()


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, growth and ends: no slot and no block is lost or held twice."""

    def __init__(self):
        super().__init__()
        self.scheduler = scheduler(max_num_seqs=3, max_model_len=400, num_blocks=30)
        self.open = []

    @rule(num_prompt=st.integers(1, 399), max_tokens=st.integers(1, 399), n=st.integers(1, 3))
    def arrive(self, num_prompt, max_tokens, n):
        r = request(num_prompt, min(max_tokens, 400 - num_prompt), n)
        self.scheduler.check(r)
        self.scheduler.add(r)
        self.open += r.sequences

    @rule()
    def admit(self):
        before = list(self.scheduler.waiting)
        entering = self.scheduler.admit()
        assert entering == before[: len(entering)]
        for sequence in entering:
            assert len(sequence.blocks) * 16 >= min(sequence.num_tokens + 1, self._final(sequence))

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), count=st.integers(1, 200))
    def grow(self, data, count):
        sequence = data.draw(st.sampled_from(list(self.scheduler.running.values())))
        for _ in range(min(count, self._final(sequence) - sequence.num_tokens)):
            sequence.num_tokens += 1
            if self.scheduler.wants_blocks(sequence):
                assert self.scheduler.extend(sequence)
            assert len(sequence.blocks) * 16 >= sequence.num_tokens

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data):
        sequence = data.draw(st.sampled_from(self.open))
        self.open.remove(sequence)
        self.scheduler.finish(sequence)
        assert sequence.state is SequenceState.FINISHED
        assert sequence.slot is None
        assert not sequence.blocks

    @staticmethod
    def _final(sequence):
        return len(sequence.request.prompt_token_ids) + sequence.request.max_tokens

    @invariant()
    def nothing_is_lost_or_shared(self):
        s = self.scheduler
        running = list(s.running.values())
        slots = [q.slot for q in running]
        assert len(set(slots)) == len(slots)
        assert len(slots) + s.num_free_slots == 3
        held = [block for q in running for block in q.blocks]
        assert len(set(held)) == len(held)
        assert len(held) + s.pool.num_free == 30
        assert 0 <= s._num_promised <= s.pool.num_free
        assert len(running) + len(s.waiting) == len(self.open)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
