"""What requests pass through: plain queues, encoder replicas that batch, and language replicas that work in steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.capacity.events import Action, Clock, Host


class Station:
    """Servers with one queue, first come, first served: ingress replicas, a Redis shard.

    Args:
        clock: the time.
        servers: how many work at once.

    Attributes:
        busy: server seconds used so far.
    """

    def __init__(self, clock: Clock, servers: int) -> None:
        self._clock = clock
        self._free = servers
        self._queue: deque[tuple[float, Action]] = deque()
        self.busy = 0.0

    def serve(self, seconds: float, done: Action) -> None:
        """Joins the queue for so long a service."""
        self._queue.append((seconds, done))
        self._next()

    def _next(self) -> None:
        while self._free and self._queue:
            seconds, done = self._queue.popleft()
            self._free -= 1
            self.busy += seconds
            self._clock.after(seconds, lambda done=done: self._end(done))  # type: ignore[misc]

    def _end(self, done: Action) -> None:
        self._free += 1
        done()
        self._next()


@dataclass
class EncoderPool:
    """Replicas that take images from one queue, up to ``batch`` at once, one forward at a time each.

    Attributes:
        hosts: one a replica; the same one several times when they share it.
        threads: cores that a forward can use.
        fixed, each: seconds of a forward, and for every image in it.
        batch: images of one forward, at most.
        images: encoded so far.
    """

    hosts: list[Host]
    threads: float
    fixed: float
    each: float
    batch: int
    images: int = 0
    _queue: deque[Action] = field(default_factory=deque)
    _idle: list[Host] = field(init=False)

    def __post_init__(self) -> None:
        self._idle = list(self.hosts)

    def encode(self, done: Action) -> None:
        """Joins the queue with one image."""
        self._queue.append(done)
        self._next()

    def _next(self) -> None:
        while self._idle and self._queue:
            host = self._idle.pop()
            taken = [self._queue.popleft() for _ in range(min(self.batch, len(self._queue)))]
            self.images += len(taken)
            seconds = self.fixed + self.each * len(taken)
            host.run(seconds, self.threads, lambda h=host, t=taken: self._end(h, t))  # type: ignore[misc]

    def _end(self, host: Host, taken: list[Action]) -> None:
        self._idle.append(host)
        for done in taken:
            done()
        self._next()


@dataclass
class _Sequence:
    prompt: int
    answer: int
    on_token: Callable[[int], None]
    given: int = 0


@dataclass
class StepTimes:
    """What one step of a language engine takes, seconds.

    Attributes:
        fixed: whatever it does: launch, read the weights.
        prompt_token: for every token of a prompt that is read.
        sequence: for every answer that grows by a token.
    """

    fixed: float
    prompt_token: float
    sequence: float


class LanguageReplica:
    """A continuously batching engine: every step lets running answers grow by one token and reads new prompts.

    Args:
        host: where it runs.
        threads: cores that a step can use.
        times: of a step.
        max_sequences, max_tokens: in one step.
    """

    def __init__(self, host: Host, threads: float, times: StepTimes, max_sequences: int, max_tokens: int) -> None:
        self._host = host
        self._threads = threads
        self._times = times
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._stepping = False
        self.tokens = 0

    @property
    def load(self) -> int:
        """Requests here."""
        return len(self._waiting) + len(self._running)

    def generate(self, prompt: int, answer: int, on_token: Callable[[int], None]) -> None:
        """Joins; ``on_token`` is told the number of every token of the answer, from 1."""
        self._waiting.append(_Sequence(prompt, answer, on_token))
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        room = self._max_tokens - len(self._running)
        fresh: list[_Sequence] = []
        read = 0
        while self._waiting and room > 0 and len(self._running) + len(fresh) < self._max_sequences:
            first = self._waiting[0]
            part = min(first.prompt, room)
            first.prompt -= part
            room -= part
            read += part
            if first.prompt:  # the rest of this prompt is read in the next step
                break
            fresh.append(self._waiting.popleft())
        growing = len(self._running)
        if not growing and not read and not fresh:
            self._stepping = False
            return
        self._stepping = True
        seconds = self._times.fixed + self._times.prompt_token * read + self._times.sequence * (growing + len(fresh))
        self._host.run(seconds, self._threads, lambda: self._end(fresh))

    def _end(self, fresh: list[_Sequence]) -> None:
        self._running += fresh
        told = list(self._running)
        for sequence in told:
            sequence.given += 1
        self._running = [sequence for sequence in told if sequence.given < sequence.answer]
        self.tokens += len(told)
        for sequence in told:
            sequence.on_token(sequence.given)
        self._step()
