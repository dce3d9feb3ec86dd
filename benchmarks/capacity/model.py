"""The whole service in simulated time: ingress, Redis, encoder pool, language pool, and the clients before it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from benchmarks.capacity.events import Clock, Host
from benchmarks.capacity.stations import EncoderPool, LanguageReplica, Station, StepTimes


@dataclass(frozen=True)
class Costs:
    """Service times, measured or worked out; seconds, unless it says otherwise.

    Attributes:
        ingress: host work of a request: parsing, fetching, hashing, the template, the stream.
        lookup: one question to Redis about an image.
        record_bytes: of an image's embedding.
        shard_bandwidth: bytes per second that one Redis process gives or takes.
        miss: of a picture that must be encoded, beside the forward: decode, patches, the calls between processes.
        forward_fixed, forward_image: of a forward, and for each image in it.
        step: of the language engine.
    """

    ingress: float
    lookup: float
    record_bytes: float
    shard_bandwidth: float
    miss: float
    forward_fixed: float
    forward_image: float
    step: StepTimes

    @property
    def transfer(self) -> float:
        """One record to or from Redis."""
        return self.lookup + self.record_bytes / self.shard_bandwidth


@dataclass(frozen=True)
class Cluster:
    """What serves.

    Attributes:
        ingress: replicas' worth of parallel host work.
        encoders, language: replicas.
        shards: Redis processes.
        batch: images of one forward, at most.
        max_sequences, max_tokens: of one step of a language replica.
        cores: that all replicas share, as on a single machine; None when each has its own.
        threads: cores that a forward and a step can use on a shared machine.
    """

    ingress: int = 1
    encoders: int = 1
    language: int = 1
    shards: int = 1
    batch: int = 16
    max_sequences: int = 64
    max_tokens: int = 8192
    cores: float | None = None
    threads: float = 1.0


@dataclass(frozen=True)
class Traffic:
    """What is asked.

    Attributes:
        rate: requests per second, Poisson; 0 for a closed loop.
        clients: of the closed loop, each sending its next request when it has its answer.
        images: of one request.
        hit_rate: share of images whose embedding is in Redis.
        text_tokens, image_tokens, answer_tokens: of a request, of an image, of an answer.
    """

    rate: float = 0.0
    clients: int = 0
    images: int = 1
    hit_rate: float = 0.8
    text_tokens: int = 64
    image_tokens: int = 256
    answer_tokens: int = 64

    @property
    def prompt_tokens(self) -> int:
        """Text and images together."""
        return self.text_tokens + self.images * self.image_tokens


@dataclass
class Outcome:
    """What the clients saw, seconds, and what was used.

    Attributes:
        ttft, latency: of every request after the warm-up.
        seconds: simulated time after the warm-up.
        use: of the capacity of each pool, as a share.
        redis_bytes: moved per second, in both directions.
    """

    ttft: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    seconds: float = 0.0
    use: dict[str, float] = field(default_factory=dict)
    redis_bytes: float = 0.0

    @property
    def rate(self) -> float:
        """Answered requests per second."""
        return len(self.latency) / self.seconds

    def ttft_at(self, percentile: float) -> float:
        """A percentile of the time to first token."""
        return float(np.percentile(self.ttft, percentile))


class Simulation:
    """One run.

    Args:
        costs: service times.
        cluster: what serves.
        traffic: what is asked.
        seed: of arrivals and hits.
    """

    def __init__(self, costs: Costs, cluster: Cluster, traffic: Traffic, seed: int = 0) -> None:
        self._costs = costs
        self._traffic = traffic
        self._random = random.Random(seed)
        self.clock = Clock()
        shared = None if cluster.cores is None else Host(self.clock, cluster.cores)
        self._cores = [shared] * (cluster.encoders + cluster.language) if shared else []

        def hosts(count: int) -> list[Host]:
            return [shared or Host(self.clock, cluster.threads) for _ in range(count)]

        self._encoder_hosts, self._language_hosts = hosts(cluster.encoders), hosts(cluster.language)
        self._ingress = Station(self.clock, cluster.ingress)
        self._shards = [Station(self.clock, 1) for _ in range(cluster.shards)]
        self._encoders = EncoderPool(
            self._encoder_hosts, cluster.threads, costs.forward_fixed, costs.forward_image, cluster.batch
        )
        self._language = [
            LanguageReplica(host, cluster.threads, costs.step, cluster.max_sequences, cluster.max_tokens)
            for host in self._language_hosts
        ]
        self._cluster = cluster
        self._bytes = 0.0
        self._left = 0
        self._done = 0
        self._warm = 0
        self._begin = 0.0
        self._outcome = Outcome()

    def run(self, requests: int) -> Outcome:
        """Simulates so many requests; the first tenth only fills the pools and is not counted."""
        self._left, self._warm = requests, requests // 10
        if self._traffic.clients:
            for _ in range(min(self._traffic.clients, requests)):
                self._arrive()
        else:
            self._later()
        self.clock.run()
        outcome = self._outcome
        outcome.seconds = self.clock.now - self._begin
        outcome.redis_bytes = self._bytes / self.clock.now
        outcome.use = {
            "ingress": self._ingress.busy / (self.clock.now * self._cluster.ingress),
            "redis": sum(shard.busy for shard in self._shards) / (self.clock.now * self._cluster.shards),
            "encoder": self._use(self._encoder_hosts),
            "language": self._use(self._language_hosts),
        }
        return outcome

    def _use(self, hosts: list[Host]) -> float:
        distinct = set(hosts)
        cores = self._cluster.cores or self._cluster.threads
        return sum(host.spent for host in distinct) / (self.clock.now * cores * len(distinct))

    def _later(self) -> None:
        if self._left:
            self.clock.after(self._random.expovariate(self._traffic.rate), self._arrive_and_plan)

    def _arrive_and_plan(self) -> None:
        self._arrive()
        self._later()

    def _arrive(self) -> None:
        self._left -= 1
        begin = self.clock.now
        self._ingress.serve(self._costs.ingress, lambda: self._look_up(begin))

    def _look_up(self, begin: float) -> None:
        """Every image by itself; the prompt goes on when all are known."""
        missing = [self._traffic.images]

        def known() -> None:
            missing[0] -= 1
            if missing[0] <= 0:
                self._generate(begin)

        if not self._traffic.images:
            known()
        for _ in range(self._traffic.images):
            shard = self._random.choice(self._shards)
            hit = self._random.random() < self._traffic.hit_rate
            after = (lambda s=shard: self._fetch(s, known)) if hit else (lambda s=shard: self._miss(s, known))
            shard.serve(self._costs.lookup, after)

    def _miss(self, shard: Station, known: object) -> None:
        def store() -> None:
            self._bytes += self._costs.record_bytes
            shard.serve(self._costs.transfer, lambda: self._fetch(shard, known))

        self.clock.after(self._costs.miss, lambda: self._encoders.encode(store))

    def _fetch(self, shard: Station, known: object) -> None:
        self._bytes += self._costs.record_bytes
        shard.serve(self._costs.transfer, known)  # type: ignore[arg-type]

    def _generate(self, begin: float) -> None:
        replica = min(self._language, key=lambda one: one.load)
        answer = self._traffic.answer_tokens

        def on_token(number: int) -> None:
            if number == 1:
                first.append(self.clock.now - begin)
            if number == answer:
                self._answered(begin, first[0])

        first: list[float] = []
        replica.generate(self._traffic.prompt_tokens, answer, on_token)

    def _answered(self, begin: float, first: float) -> None:
        self._done += 1
        if self._done == self._warm:
            self._begin = self.clock.now
        if self._done > self._warm:
            self._outcome.ttft.append(first)
            self._outcome.latency.append(self.clock.now - begin)
        if self._traffic.clients and self._left:
            self._arrive()
