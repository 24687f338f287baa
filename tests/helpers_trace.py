"""Reads the trace files that the engine writes."""

import json
from collections import defaultdict

import pytest


class Trace:
    """A trace file as a test reads it."""

    def __init__(self, path):
        self.content = json.loads(path.read_text())
        self.lanes = {}
        self.spans = defaultdict(list)  # by lane: (begin, end, name, args)
        self.marks = defaultdict(list)  # by lane: (name, args)
        self.counters = defaultdict(list)  # by name: args
        for event in self.content["traceEvents"]:
            if event["ph"] == "M":
                if event["name"] == "thread_name":
                    self.lanes[event["tid"]] = event["args"]["name"]
                continue
            assert event["ts"] >= 0
            if event["ph"] == "X":
                assert event["dur"] >= 0
                end = event["ts"] + event["dur"]
                self.spans[self.lanes[event["tid"]]].append((event["ts"], end, event["name"], event["args"]))
            elif event["ph"] == "i":
                self.marks[self.lanes[event["tid"]]].append((event["name"], event.get("args")))
            else:
                assert event["ph"] == "C"
                self.counters[event["name"]].append(event["args"])

    @property
    def slots(self):
        return [lane for lane in self.lanes.values() if lane.startswith("slot ")]

    def check_lanes(self):
        """Spans of a slot follow each other; of the loop, steps do, and hold their two parts exactly."""
        for lane in self.slots:
            follow_each_other([span[:2] for span in self.spans[lane]])
        loop = self.spans["loop"]
        steps = [span for span in loop if span[2] == "step"]
        follow_each_other([span[:2] for span in steps])
        forwards = [span[:2] for span in loop if span[2] == "forward"]
        samplings = [span[:2] for span in loop if span[2] == "sampling"]
        for step, forward, sampling in zip(steps, forwards, samplings, strict=True):
            assert step[0] == forward[0]
            assert forward[1] == pytest.approx(sampling[0], abs=2e-3)
            assert sampling[1] == pytest.approx(step[1], abs=2e-3)
        return steps

    def ends(self):
        """(request, reason) of every end."""
        reasons = {"stop", "length", "abort", "error"}
        return sorted(
            (args["request"], name)
            for marks in self.marks.values()
            for name, args in marks
            if name in reasons
        )


def follow_each_other(spans):
    last_end = 0.0
    for begin, end in sorted(spans):
        assert begin >= last_end - 2e-3  # microseconds, rounded to thousandths
        last_end = end
