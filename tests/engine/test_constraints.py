"""Constrained sequences in the engine, over the scripted executor."""

import logging
import threading

import pytest
from fake_executor import FakeExecutor
from test_engine import ids, wait_for
from toy import EOS, running_engine, say

import gapless.structured.masks
from gapless import StructuredOutputs
from gapless.errors import EngineError, InvalidRequestError
from gapless.sampling import SamplingParams


def params(max_tokens=50, n=1, **constraint):
    return SamplingParams(max_tokens=max_tokens, n=n, structured_outputs=StructuredOutputs(**constraint))


# With so many optional parts the parser has more to keep in mind than it accepts: the first token is allowed,
# nothing after it is.
TOO_MUCH = "start: " + " ".join(f'"x{number}"?' for number in range(2500))


class GatedExecutor(FakeExecutor):
    """Masks arrive only while the gate is open."""

    def __post_init__(self):
        super().__post_init__()
        self.gate = threading.Event()

    def set_mask(self, slot, sequence_id, output_index, mask):
        assert self.gate.wait(10)
        super().set_mask(slot, sequence_id, output_index, mask)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        ({"choice": ["helm", "help me"]}, "helm"),
        ({"regex": "[0-9]{3}"}, "999"),
        ({"grammar": 'root ::= "<" [a-z]+ ">"'}, "<ello>"),
        ({"json": {"enum": ["hello", "world"]}}, '"hello"'),
    ],
)
def test_the_output_keeps_to_its_constraint(constraint, text):
    with running_engine(FakeExecutor(script=say("hello>"))) as (engine, _):
        result = engine.submit(ids("Hi"), params(**constraint)).result(timeout=20)
    (choice,) = result.outputs
    assert choice.text == text
    assert choice.token_ids == [*ids(text), EOS]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_without_its_mask_nothing_is_sampled_and_nobody_waits_with_it():
    executor = GatedExecutor(script=say("hello"))
    with running_engine(executor) as (engine, _):
        constrained = engine.submit(ids("Hi"), params(choice=["help"]))
        free = [engine.submit(ids("Hi"), SamplingParams(max_tokens=20)) for _ in range(10)]
        assert [handle.result(10).outputs[0].text for handle in free] == ["hello"] * 10
        assert constrained.output.outputs[0].token_ids == []
        assert executor.slots[0].token_ids == ids("Hi")
        executor.gate.set()
        assert constrained.result(10).outputs[0].text == "help"


def test_every_choice_has_its_own_place_in_the_grammar():
    with running_engine(FakeExecutor(script=say("a", end=False))) as (engine, _):
        result = engine.submit(ids("Hi"), params(regex="a{5}b{2}|a{7}", n=6)).result(20)
    assert [choice.text for choice in result.outputs] == ["aaaaaaa"] * 6


def test_what_cannot_be_expressed_is_refused_before_it_is_queued():
    with running_engine() as (engine, executor):
        for constraint in ({"grammar": "root ::= root"}, {"json": {"type": "array", "uniqueItems": True}}):
            with pytest.raises(InvalidRequestError):
                engine.submit(ids("Hi"), params(**constraint))
        assert not executor.admissions
        assert engine.stats()["num_waiting"] == 0


def test_an_output_that_cannot_go_on_ends_with_an_error_and_harms_nobody():
    with running_engine(FakeExecutor(script=say("xxx"))) as (engine, executor):
        broken = engine.submit(ids("Hi"), params(grammar=TOO_MUCH))
        fine = [engine.submit(ids("Hi"), params(regex="x+")) for _ in range(5)]
        with pytest.raises(EngineError, match="cannot go on under its grammar"):
            broken.result(20)
        assert broken.output.outputs[0].finish_reason == "error"
        assert [handle.result(10).outputs[0].text for handle in fine] == ["xxx"] * 5
        wait_for(lambda: engine.stats()["num_running"] == 0)
        assert not executor.slots
        assert engine.stats()["num_free_blocks"] == executor.num_blocks


def test_a_failure_of_one_choice_leaves_the_others():
    with running_engine(FakeExecutor(script=say("xxx"))) as (engine, _):
        request = engine.make_request(ids("Hi"), params(grammar=TOO_MUCH, n=3))
        ends = []
        engine.start(request, lambda request, events: ends.extend(e for e in events if hasattr(e, "reason")))
        wait_for(lambda: len(ends) == 3)
        assert sorted(end.choice for end in ends) == [0, 1, 2]
        assert {end.reason.value for end in ends} == {"error"}
        assert request.is_finished


def test_a_bug_in_the_masks_ends_the_outputs_that_need_them(monkeypatch, caplog):
    def broken(steps, pool):
        raise RuntimeError("no idea")

    monkeypatch.setattr(gapless.structured.masks, "advance", broken)
    with caplog.at_level(logging.CRITICAL), running_engine(FakeExecutor(script=say("xxx"))) as (engine, _):
        handles = [engine.submit(ids("Hi"), params(regex="x+")) for _ in range(3)]
        for handle in handles:
            with pytest.raises(EngineError, match="no idea"):
                handle.result(20)
        assert engine.submit(ids("Hi"), SamplingParams(max_tokens=3)).result(5).outputs[0].text == "xxx"


def test_a_mask_that_the_executor_refuses(monkeypatch, caplog):
    class Refusing(FakeExecutor):
        def set_mask(self, slot, sequence_id, output_index, mask):
            raise ValueError("wrong size")

    with caplog.at_level(logging.CRITICAL), running_engine(Refusing()) as (engine, _):
        with pytest.raises(EngineError, match="wrong size"):
            engine.submit(ids("Hi"), params(regex="x+")).result(20)
        wait_for(lambda: engine.stats()["num_running"] == 0)


def test_preempted_outputs_go_on_where_they_were():
    executor = FakeExecutor(num_blocks=10, max_seq_len=160, script=say("abcdefghij", end=False))
    with running_engine(executor) as (engine, _):
        handles = [
            engine.submit(ids(f"{number}"), params(100, regex="[a-e]{77}[0-9]{3}")) for number in range(4)
        ]
        outputs = [handle.result(20).outputs[0] for handle in handles]
        assert engine.stats()["num_preemptions"] > 0
    (alone,) = {output.text for output in outputs}
    assert {output.finish_reason for output in outputs} == {"stop"}
    assert len(alone) == 80
    assert alone[77:].isdigit()
    assert set(alone[:77]) == set("abcde")


def test_cancelling_while_a_mask_is_awaited():
    executor = GatedExecutor()
    with running_engine(executor) as (engine, _):
        handles = [engine.submit(ids("Hi"), params(regex="x+")) for _ in range(8)]
        wait_for(lambda: len(executor.slots) == 4)
        for handle in handles:
            handle.cancel()
        executor.gate.set()
        assert [handle.result(5).outputs[0].finish_reason for handle in handles] == ["abort"] * 8
        assert engine.submit(ids("Hi"), params(regex="x{3}")).result(5).outputs[0].text == "xxx"


def test_closing_while_masks_are_computed():
    for _ in range(5):
        with running_engine(FakeExecutor(script=say("x", end=False))) as (engine, _):
            handles = [engine.submit(ids("Hi"), params(200, regex="x+")) for _ in range(4)]
            wait_for(lambda: engine.stats()["num_running"] > 0)
        assert {handle.result(5).outputs[0].finish_reason for handle in handles} <= {"abort", "length"}


def test_the_grammar_alone_says_where_the_end_may_come():
    constraint = StructuredOutputs(choice=["abc"])
    with running_engine(FakeExecutor(script=say("ab"))) as (engine, _):
        for field in ({"min_tokens": 20}, {"ignore_eos": True}):
            choice = (
                engine.submit(
                    ids("Hi"), SamplingParams(max_tokens=20, structured_outputs=constraint, **field)
                )
                .result(10)
                .outputs[0]
            )
            assert (choice.text, choice.finish_reason) == ("abc", "stop")


def test_stop_strings_and_stop_tokens_cut_it_off():
    constraint = StructuredOutputs(regex="[a-z]{20}")
    with running_engine(FakeExecutor(script=say("abcdefghij", end=False))) as (engine, _):
        text = SamplingParams(max_tokens=50, stop="fg", structured_outputs=constraint)
        assert engine.submit(ids("Hi"), text).result(10).outputs[0].text == "abcde"
        token = SamplingParams(max_tokens=50, stop_token_ids=ids("d"), structured_outputs=constraint)
        choice = engine.submit(ids("Hi"), token).result(10).outputs[0]
        assert (choice.text, choice.stop_reason) == ("abc", ord("d"))
        length = SamplingParams(max_tokens=4, structured_outputs=constraint)
        assert engine.submit(ids("Hi"), length).result(10).outputs[0].finish_reason == "length"


def test_without_constraints_there_are_no_masks():
    with running_engine() as (engine, _):
        engine.submit(ids("Hi"), SamplingParams(max_tokens=4)).result(5)
        assert "gapless-masks" not in {thread.name for thread in threading.enumerate()}
