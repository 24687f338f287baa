import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gapless.engine.request import Request, SequenceState
from gapless.engine.scheduler import LOOKAHEAD_TOKENS, Scheduler, SchedulerConfig
from gapless.errors import ContextLengthError
from gapless.sampling import Pooling, SamplingParams

SIZE = 16


def request(prompt=8, max_tokens=8, priority=0, pooling=None, **params):
    """`prompt`: its tokens, or how many; then they are like no other's."""
    if isinstance(prompt, int):
        request.marker = getattr(request, "marker", 0) + 1
        prompt = [request.marker + 1000] * prompt
    return Request("r", prompt, SamplingParams(**params), max_tokens, priority=priority, pooling=pooling)


def scheduler(max_num_seqs=2, max_model_len=64, num_blocks=8, **options):
    return Scheduler(SchedulerConfig(max_num_seqs, max_model_len, num_blocks, SIZE, **options))


def add(s, *requests):
    for r in requests:
        s.check(r)
        s.add(r)
    return [sequence for r in requests for sequence in r.sequences]


def entering(s):
    return [admission.sequence for admission in s.schedule().admissions]


def compute(s, sequence, num_tokens=0):
    """The executor computes what there is, and `num_tokens` more one by one."""
    for _ in range(1 + num_tokens):
        s.token(sequence, 7)


def test_first_come_first_served():
    s = scheduler()
    first, second, third = add(s, request(), request(), request())
    assert entering(s) == [first, second]
    assert entering(s) == []
    s.finish(first)
    assert entering(s) == [third]
    assert third.slot == 0
    assert third.state is SequenceState.PREFILL


def test_a_small_request_does_not_overtake_a_large_one():
    s = scheduler(max_num_seqs=4)
    first, large, small = add(s, request(60, 4), request(60, 4), request(1, 1))
    s.pool.allocate(3)
    assert entering(s) == [first]
    s.finish(first)
    assert entering(s) == [large]
    s.finish(large)
    assert entering(s) == [small]


def test_lower_priority_numbers_go_first_and_put_others_out():
    s = scheduler(max_num_seqs=1)
    ordinary, later, urgent = add(s, request(priority=0), request(priority=5), request(priority=-1))
    assert entering(s) == [urgent]
    s.finish(urgent)
    assert entering(s) == [ordinary]
    (more_urgent,) = add(s, request(priority=-7))
    decisions = s.schedule()
    assert (decisions.preemptions, decisions.admissions) == ([ordinary], [])
    assert s.schedule().preemptions == []  # it is on its way out already
    s.preempted(ordinary, 0)
    assert ordinary.state is SequenceState.PREEMPTED
    assert entering(s) == [more_urgent]
    s.finish(more_urgent)
    assert entering(s) == [ordinary]  # before the one that came later
    s.finish(ordinary)
    assert entering(s) == [later]


def test_equals_do_not_put_each_other_out():
    s = scheduler(max_num_seqs=1)
    add(s, request(priority=3), request(priority=3))
    s.schedule()
    assert s.schedule().preemptions == []


def test_blocks_are_granted_ahead_of_the_last_token():
    s = scheduler(max_num_seqs=4, max_model_len=1024, num_blocks=64)
    (sequence,) = add(s, request(16, 512))
    entering(s)
    assert len(sequence.blocks) == 9  # prompt and look-ahead, not all 33
    compute(s, sequence)
    while sequence.num_tokens < 528:
        assert len(sequence.blocks) * SIZE >= min(sequence.num_tokens + LOOKAHEAD_TOKENS // 2 - SIZE, 528)
        s.token(sequence, 7)
        s.schedule()
    assert len(sequence.blocks) == 33  # never more than it may need


def test_when_blocks_run_out_the_last_in_line_gives_way():
    s = scheduler(max_num_seqs=4, max_model_len=128, num_blocks=8)
    first, second = add(s, request(16, 100), request(16, 100))
    assert entering(s) == [first, second]
    while s.pool.num_free:
        compute(s, first, SIZE - 1)
        s.schedule()
    while len(first.blocks) * SIZE > first.num_tokens:
        s.token(first, 7)
    compute(s, second)
    s.token(first, 7)
    s.needs_blocks(first)
    assert s.schedule().preemptions == [second]
    assert s.schedule().extensions == []  # nothing to give yet
    s.preempted(second, 16)
    assert [q for q, _ in s.schedule().extensions] == [first]
    assert second.request.num_preemptions == 1
    s.finish(first)
    (admission,) = s.schedule().admissions
    assert admission.sequence is second
    assert second.tokens == [*second.request.prompt_token_ids, 7]  # it goes on where it was


def test_the_last_in_line_gives_way_to_itself():
    s = scheduler(max_num_seqs=4, max_model_len=128, num_blocks=8)
    _, second = add(s, request(16, 16), request(16, 100))
    s.schedule()
    compute(s, second)
    while len(second.blocks) * SIZE >= second.num_tokens:
        s.token(second, 7)
    s.pool.allocate(s.pool.num_free)
    s.needs_blocks(second)
    assert s.schedule().preemptions == [second]


def test_a_request_for_blocks_that_are_on_their_way_is_no_reason_to_preempt():
    s = scheduler()
    (sequence,) = add(s, request(16, 40))
    s.schedule()
    s.needs_blocks(sequence)  # asked before the look-ahead arrived
    decisions = s.schedule()
    assert (decisions.extensions, decisions.preemptions) == ([], [])


@pytest.mark.parametrize("num_prompt", [64, 65, 1000])
def test_a_prompt_that_can_never_fit_is_refused_with_numbers(num_prompt):
    with pytest.raises(ContextLengthError, match=rf"length is 64 tokens.*too long with {num_prompt}"):
        scheduler().check(request(num_prompt))
    scheduler().check(request(63, 1))


def test_a_request_that_the_cache_could_not_hold_alone_is_refused():
    with pytest.raises(ContextLengthError, match=r"KV cache of 32 tokens"):
        scheduler(num_blocks=2).check(request(20, 20))


def test_choices_have_seeds_of_their_own():
    s = scheduler()
    first, second = request(n=3, seed=7), request(n=3, seed=7)
    add(s, first, second)
    seeds = [q.seed for q in first.sequences]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert [q.seed for q in second.sequences] == seeds
    assert request().choice_seeds() != request().choice_seeds()


# --- the prefix cache ---


def test_a_finished_prompt_is_found_again():
    s = scheduler(num_blocks=16)
    prompt = list(range(40))
    (first,) = add(s, request(prompt))
    s.schedule()
    compute(s, first)
    blocks = first.blocks[:2]
    s.finish(first, 40)
    (second,) = add(s, request([*prompt[:35], 99, 98]))
    (admission,) = s.schedule().admissions
    assert admission.num_cached == 32
    assert second.blocks[:2] == blocks
    assert second.request.num_cached_tokens == 32


def test_output_is_found_too():
    s = scheduler(num_blocks=16)
    (first,) = add(s, request(list(range(10)), 30))
    s.schedule()
    compute(s, first, 29)
    s.finish(first, 39)
    add(s, request([*first.tokens, 5]))
    (admission,) = s.schedule().admissions
    assert admission.num_cached == 32


def test_the_last_token_of_a_prompt_is_always_computed():
    s = scheduler(num_blocks=16)
    prompt = list(range(32))
    (first,) = add(s, request(prompt))
    s.schedule()
    compute(s, first)
    s.finish(first, 32)
    add(s, request(prompt))
    (admission,) = s.schedule().admissions
    assert admission.num_cached == 31


def test_equal_tokens_after_a_different_beginning_are_not_the_same_block():
    s = scheduler(num_blocks=16)
    (first,) = add(s, request([1] * 16 + [2] * 17))
    s.schedule()
    compute(s, first)
    s.finish(first, 33)
    add(s, request([3] * 16 + [2] * 17))
    (admission,) = s.schedule().admissions
    assert admission.num_cached == 0


def test_blocks_that_were_never_computed_are_not_found():
    s = scheduler(num_blocks=16)
    prompt = list(range(48))
    (first,) = add(s, request(prompt))
    s.schedule()
    s.prefilled(first, 20)
    s.finish(first, 20)  # cancelled in its prefill
    add(s, request(prompt))
    (admission,) = s.schedule().admissions
    assert admission.num_cached == 16


def test_choices_share_the_blocks_of_their_prompt():
    s = scheduler(max_num_seqs=4, num_blocks=32)
    sequences = add(s, request(list(range(40)), n=3))
    assert entering(s) == sequences[:1]  # the others wait until the prompt is computed
    assert s.num_waiting == 2
    compute(s, sequences[0])
    admissions = s.schedule().admissions
    assert [a.sequence for a in admissions] == sequences[1:]
    assert [a.num_cached for a in admissions] == [32, 32]
    assert all(q.blocks[:2] == sequences[0].blocks[:2] for q in sequences)
    assert len({q.blocks[2] for q in sequences}) == 3
    assert [s.pool.num_holders(block) for block in sequences[0].blocks[:2]] == [3, 3]


def test_those_who_wait_for_a_prefix_do_not_keep_others_waiting():
    s = scheduler(max_num_seqs=4, num_blocks=32)
    first, same, other = add(s, request(list(range(40))), request(list(range(40))), request(40))
    assert entering(s) == [first, other]
    s.prefilled(first, 16)
    assert entering(s) == []
    s.prefilled(first, 32)
    assert entering(s) == [same]


def test_who_waits_for_a_prefix_goes_on_alone_when_its_owner_ends():
    s = scheduler(max_num_seqs=4, num_blocks=32)
    first, second = add(s, request(list(range(40))), request(list(range(40))))
    s.schedule()
    s.prefilled(first, 16)
    s.finish(first, 16)
    (admission,) = s.schedule().admissions
    assert admission.sequence is second
    assert admission.num_cached == 16


def test_an_urgent_request_does_not_wait_for_a_less_urgent_one():
    s = scheduler(max_num_seqs=4, num_blocks=32)
    add(s, request(list(range(40)), priority=5))
    s.schedule()
    (urgent,) = add(s, request(list(range(40)), priority=1))
    assert entering(s) == [urgent]


def test_a_request_that_waits_for_a_prefix_can_end():
    s = scheduler(max_num_seqs=4, num_blocks=32)
    first, second = add(s, request(list(range(40))), request(list(range(40))))
    s.schedule()
    s.finish(second)
    compute(s, first)
    assert entering(s) == []
    s.finish(first, 40)
    assert (s.num_waiting, s.open_sequences()) == (0, [])


def test_the_block_let_go_first_is_given_out_first_and_a_prefix_after_its_continuation():
    s = scheduler(max_num_seqs=4, max_model_len=128, num_blocks=8)
    old, new = add(s, request(list(range(32)), 1), request(list(range(100, 132)), 1))
    s.schedule()
    compute(s, old)
    compute(s, new)
    s.finish(old, 32)
    s.finish(new, 32)
    s.pool.free(s.pool.allocate(5))  # of 8 blocks 4 are kept: one of them has to go
    add(s, request([*range(32), 7], 1), request([*range(100, 132), 7], 1))
    assert [admission.num_cached for admission in s.schedule().admissions] == [16, 32]


def test_prompt_log_probabilities_need_the_whole_prompt():
    s = scheduler(max_num_seqs=4, num_blocks=32)
    (first,) = add(s, request(list(range(40))))
    s.schedule()
    compute(s, first)
    add(s, request(list(range(40)), prompt_logprobs=1))
    (admission,) = s.schedule().admissions
    assert admission.num_cached == 0


def test_without_prefix_caching_nothing_is_shared():
    s = scheduler(max_num_seqs=4, num_blocks=32, prefix_caching=False)
    sequences = add(s, request(list(range(40)), n=2))
    assert entering(s) == sequences
    assert not set(sequences[0].blocks) & set(sequences[1].blocks)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, growth, ends, cancellations and preemptions in any order, beside a plain model of the
    executor: what each slot holds, and the contents of every block."""

    NUM_BLOCKS, NUM_SLOTS, MAX_LEN = 14, 3, 200

    def __init__(self):
        super().__init__()
        self.scheduler = scheduler(self.NUM_SLOTS, self.MAX_LEN, self.NUM_BLOCKS)
        self.contents = {}  # block -> the tokens up to its end, if it is full
        self.slots = {}  # slot -> (sequence, blocks, number of tokens computed)
        self.leaving = []  # preemptions that the executor has not taken in yet
        self.open = set()

    def _schedule(self):
        decisions = self.scheduler.schedule()
        for sequence, blocks in decisions.extensions:
            self.slots[sequence.slot][1].extend(blocks)
        for admission in decisions.admissions:
            sequence = admission.sequence
            assert sequence.slot not in self.slots, "slot taken twice"
            self.slots[sequence.slot] = [sequence, list(sequence.blocks), admission.num_cached]
            for index in range(-(-admission.num_cached // SIZE)):
                tokens = tuple(sequence.tokens[: (index + 1) * SIZE])
                assert self.contents.get(sequence.blocks[index]) == tokens, "cached block has other contents"
            assert len(sequence.blocks) * SIZE >= sequence.num_tokens
            pooling = sequence.request.pooling
            assert admission.num_cached == 0 or pooling is None or not pooling.needs_all_tokens
        self.leaving += decisions.preemptions

    def _compute(self, slot, count):
        """The executor computes up to `count` tokens of a slot; how many it did."""
        sequence, blocks, num_computed = slot
        end = min(num_computed + count, sequence.num_tokens, len(blocks) * SIZE)
        for position in range(num_computed, end):
            block, tokens = blocks[position // SIZE], tuple(sequence.tokens[: position + 1])
            known = self.contents.get(block, ())
            if (len(known) - 1) // SIZE == position // SIZE and known[: position + 1] == tokens:
                continue  # the very same bits
            assert self.scheduler.pool.num_holders(block) == 1, "writes into a shared block"
            self.contents[block] = tokens
        slot[2] = end
        return end - num_computed

    def _running(self, data):
        return self.slots[data.draw(st.sampled_from(sorted(self.slots)))]

    @rule(
        start=st.integers(0, 2),  # few beginnings: many are alike
        num_prompt=st.integers(1, 120),
        max_tokens=st.integers(1, 80),
        n=st.integers(1, 3),
        priority=st.integers(0, 2),
    )
    def arrive(self, start, num_prompt, max_tokens, n, priority):
        prompt = [start * 1000 + i for i in range(num_prompt)]
        r = request(prompt, min(max_tokens, self.MAX_LEN - num_prompt), priority, n=n)
        self.open.update(add(self.scheduler, r))
        self._schedule()

    @rule(
        start=st.integers(0, 2),
        num_prompt=st.integers(1, 200),
        pooling=st.sampled_from(Pooling),
        priority=st.integers(0, 2),
    )
    def arrive_to_be_embedded(self, start, num_prompt, pooling, priority):
        prompt = [start * 1000 + i for i in range(num_prompt)]
        self.open.update(add(self.scheduler, request(prompt, 0, priority, pooling)))
        self._schedule()

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), count=st.integers(1, 64))
    def prefill(self, data, count):
        slot = self._running(data)
        if slot[2] + count < slot[0].num_tokens and self._compute(slot, count):
            self.scheduler.prefilled(slot[0], slot[2])
            self._schedule()

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), count=st.integers(1, 40), token=st.integers(0, 1))
    def decode(self, data, count, token):
        slot = self._running(data)
        sequence = slot[0]
        for _ in range(count):
            if self._most(sequence) == sequence.num_tokens:
                return self._finish(sequence)
            self._compute(slot, self.MAX_LEN)
            if slot[2] < sequence.num_tokens:
                self.scheduler.needs_blocks(sequence)
                return self._schedule()
            self.scheduler.token(sequence, token)
            self._schedule()
        return None

    @precondition(lambda self: self.leaving)
    @rule()
    def the_executor_puts_one_out(self):
        sequence = self.leaving.pop(0)
        if sequence in self.open:
            num_computed = self.slots.pop(sequence.slot)[2]
            self.scheduler.preempted(sequence, num_computed)
            self._schedule()

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data):
        self._finish(data.draw(st.sampled_from(sorted(self.open, key=lambda sequence: sequence.id))))

    def _finish(self, sequence):
        self.open.remove(sequence)
        num_computed = self.slots.pop(sequence.slot)[2] if sequence.is_running else 0
        self.scheduler.finish(sequence, num_computed)
        assert sequence.state is SequenceState.FINISHED
        assert sequence.slot is None
        self._schedule()

    def _most(self, sequence):
        return len(sequence.request.prompt_token_ids) + sequence.request.max_tokens

    @invariant()
    def blocks_are_counted_right(self):
        pool = self.scheduler.pool
        held = [block for sequence in self.scheduler.running.values() for block in sequence.blocks]
        for block in range(self.NUM_BLOCKS):
            assert pool.num_holders(block) == held.count(block)
        assert pool.num_free == self.NUM_BLOCKS - len(set(held))

    @invariant()
    def slots_are_counted_right(self):
        running = self.scheduler.running.values()
        assert {q.slot for q in running} == set(self.slots)
        assert self.scheduler.num_free_slots == self.NUM_SLOTS - len(self.slots)
        for sequence in running:
            assert self.slots[sequence.slot][1] == sequence.blocks

    @invariant()
    def nobody_is_forgotten(self):
        assert set(self.scheduler.open_sequences()) == self.open
        assert self.scheduler.num_waiting == len(self.open) - len(self.slots)

    def teardown(self):
        """However things stand, everybody gets to the end, the first in line first."""
        for _ in range(10_000):
            if not self.open:
                break
            while self.leaving:
                self.the_executor_puts_one_out()
            assert self.slots, "nobody runs, though some wait"
            for slot in list(self.slots.values()):
                sequence = slot[0]
                if self.slots.get(sequence.slot) is not slot:
                    continue  # ended or put out meanwhile
                if self._most(sequence) == sequence.num_tokens:
                    self._finish(sequence)
                    continue
                self._compute(slot, self.MAX_LEN)
                if slot[2] < sequence.num_tokens:
                    self.scheduler.needs_blocks(sequence)
                else:
                    self.scheduler.token(sequence, 1)
                self._schedule()
        assert not self.open, "somebody never gets to the end"
        assert self.scheduler.pool.num_free == self.NUM_BLOCKS
        assert not self.scheduler._computing
        assert not self.scheduler._parked


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)
