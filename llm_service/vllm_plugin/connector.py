"""``RedisECConnector``: any multimodal model of a stock vLLM shares its encoder outputs over Redis.

What one engine has encoded, every other engine with the same weights loads, also after a restart. A miss, a slow or
dead Redis or a damaged entry costs at most the cache's deadline: the engine then encodes by itself, as it would have
done without the connector. See ``docs/vllm-plugin.md``.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput

from llm_service.vllm_plugin.connector_base import PrefetchingConnector, StepMetadata
from llm_service.vllm_plugin.connector_settings import read_settings
from llm_service.vllm_plugin.connector_stats import RedisPromMetrics, RedisStats, WorkerCounts
from llm_service.vllm_plugin.identity import Unhashable, item_digest, model_namespace
from llm_service.vllm_plugin.prefetch import Need, Prefetcher
from llm_service.vllm_plugin.saver import Saver
from shared.cache import EmbeddingCache
from shared.cache.topology import refuse_cluster
from shared.errors import ConfigError
from shared.keys import Namespace
from shared.record_values import Encoding
from shared.records import Buffer, decode_record

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

#: threads that hash what goes into the encoder
HASHERS = 2


class _Name(NamedTuple):
    """What a feature is called by vLLM, and where its embedding is cached."""

    identifier: str
    found: Future[str | None]

    @property
    def key(self) -> str | None:
        """None for what has no key, or while it is being looked for."""
        return self.found.result() if self.found.done() else None


class RedisECConnector(PrefetchingConnector):
    """See the module. Extra configuration: :class:`~llm_service.vllm_plugin.connector_settings.ConnectorSettings`.

    Raises:
        ConfigError: the configuration cannot be used, or Redis is a node of a Redis Cluster.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        assert vllm_config.ec_transfer_config is not None
        settings = read_settings(vllm_config.ec_transfer_config.ec_connector_extra_config)
        self._cache = EmbeddingCache(settings.cache, settings.redis_url)
        self._saver: Saver | None = None
        self._counts: Counter[str] = Counter()
        if role is ECConnectorRole.WORKER:
            if self.is_producer and _first_rank():
                self._saver = Saver(self._cache, settings.save_mib << 20, Encoding[settings.records.upper()])
            return
        _check(vllm_config, settings.fingerprint)
        refuse_cluster(self._cache)
        model = vllm_config.model_config
        self._width: int = model.get_inputs_embeds_size()
        self._itemsize: int = model.dtype.itemsize
        lora = vllm_config.lora_config
        #: adapters on the tower make other embeddings, and their weights are not part of the fingerprint
        self._tower_adapters = lora is not None and lora.enable_tower_connector_lora
        self._fields = _embedding_fields(model)
        self._hashers = ThreadPoolExecutor(HASHERS, thread_name_prefix="lookonce-hash")
        self._namespace: Future[Namespace] = self._hashers.submit(model_namespace(model, settings.fingerprint))
        self._namespace.add_done_callback(_tell)
        #: request → its features' names, by index
        self._names: dict[str, dict[int, _Name]] = {}
        #: of the request that vLLM schedules now: its keys by identifier
        self._current: dict[str, str | None] = {}
        self._prefetcher = Prefetcher(self._fetch, settings.prefetch_mib << 20)

    # Scheduler side

    def _available(self, request: Request, ahead: Sequence[int]) -> bool:
        names = self._names.setdefault(request.request_id, {})
        for index in ahead:
            if index not in names:
                feature = request.mm_features[index]
                names[index] = _Name(feature.identifier, self._find(request, feature))
        if not all(names[index].found.done() for index in ahead):
            return False
        keyed = {index: key for index in ahead if (key := names[index].key) is not None}
        needs = [self._need(key, request.mm_features[index]) for index, key in keyed.items()]
        if self.is_consumer and not self._prefetcher.settled(request.request_id, needs):
            return False
        hits = {index for index, key in keyed.items() if self.is_consumer and self._prefetcher.get(key) is not None}
        self._count_loads(needs, len(ahead))
        if any(self._bare(request.mm_features[index]) for index in ahead if index not in hits):
            logger.warning("request %s has nothing to encode, and no embedding of it is cached", request.request_id)
            self._unavailable.add(request.request_id)
            self._counts["unavailable"] += 1
            return False
        return True

    def _find(self, request: Request, feature: MultiModalFeatureSpec) -> Future[str | None]:
        """The key of a feature, from a hasher thread; None for what has none."""
        adapted = self._tower_adapters and request.lora_request is not None
        # the weights are hashed while the engine starts; nobody waits for that
        ready = self._namespace.done() and self._namespace.exception() is None
        if feature.data is None or adapted or self._given(feature) or self._bare(feature) or not ready:
            nothing: Future[str | None] = Future()
            nothing.set_result(None)
            return nothing
        namespace, fields = self._namespace.result(), feature.data.get_data()

        def find() -> str | None:
            try:
                return namespace.embedding_key(item_digest(feature.modality, fields, request.cache_salt))
            except Unhashable as error:
                logger.warning("an item of kind %s has no key: it holds %s", feature.modality, error)
                return None

        return self._hashers.submit(find)

    def _given(self, feature: MultiModalFeatureSpec) -> bool:
        """Whether the client sent the embedding itself."""
        roles = self._fields.get(feature.modality, {})
        return any(roles.get(name) not in (None, "metadata") for name in feature.data or ())

    def _bare(self, feature: MultiModalFeatureSpec) -> bool:
        """Whether the client sent nothing that could be encoded, only what sizes the placeholder."""
        roles = self._fields.get(feature.modality, {})
        return feature.data is not None and all(roles.get(name) == "metadata" for name in feature.data)

    def _need(self, key: str, feature: MultiModalFeatureSpec) -> Need:
        tokens = feature.mm_position.get_num_embeds()
        return Need(key, tokens, None, tokens * self._width * self._itemsize)

    def _count_loads(self, needs: list[Need], items: int) -> None:
        self._counts["uncacheable"] += items - len(needs)
        for need in needs if self.is_consumer else ():
            tensor = self._prefetcher.get(need.key)
            self._counts["misses" if tensor is None else "hits"] += 1
            self._counts["bytes_loaded"] += 0 if tensor is None else tensor.nbytes

    def _fetch(self, needs: Sequence[Need]) -> list[torch.Tensor | None]:
        """Runs in a prefetch thread."""
        records = self._cache.fetch_many([need.key for need in needs])
        return [self._fitting(need, record) for need, record in zip(needs, records, strict=True)]

    def _fitting(self, need: Need, record: Buffer | None) -> torch.Tensor | None:
        if record is None:
            return None
        header, tensor = decode_record(record, need.key, verify=False)
        # some models hand several layers over side by side
        if header.tokens != need.tokens or header.width % self._width:
            logger.warning("record %s holds [%d, %d]: not used", need.key, header.tokens, header.width)
            return None
        return tensor

    def _enter(self, request: Request) -> None:
        self._current = {name.identifier: name.key for name in self._names.get(request.request_id, {}).values()}

    def _key(self, identifier: str) -> str | None:
        return self._current.get(identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """This step's embeddings, and the keys of what it encodes."""
        loads, self._loads = self._loads, {}
        saves: dict[str, str] = {}
        for owner, indices in scheduler_output.scheduled_encoder_inputs.items() if self.is_producer else ():
            names = self._names.get(owner, {})
            for name in (names[index] for index in indices if index in names):
                if name.key is not None:
                    saves[name.identifier] = name.key
        return StepMetadata(loads, saves)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request."""
        self._names.pop(request.request_id, None)
        return super().request_finished(request)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        """Takes what the workers counted."""
        if isinstance(meta := connector_output.ec_connector_worker_meta, WorkerCounts):
            self._counts.update(meta.counts)

    # Worker side

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Hands a new encoder output to the background."""
        key = self._step().saves.get(mm_hash)
        if self._saver is not None and key is not None:
            self._saver.save(key, encoder_cache[mm_hash])

    def build_connector_worker_meta(self) -> WorkerCounts | None:
        """What was counted since the last step."""
        counts = {} if self._saver is None else self._saver.take_counts()
        return WorkerCounts(counts) if counts else None

    # Both

    def get_ec_connector_stats(self) -> RedisStats | None:
        """The scheduler's counters; a worker's come to it as metadata, with every model runner."""
        counts, self._counts = self._counts, Counter()
        return RedisStats(dict(counts)) if counts else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> RedisStats:
        """See vLLM."""
        return RedisStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> RedisPromMetrics:
        """See vLLM."""
        return RedisPromMetrics(*args)

    def shutdown(self) -> None:
        """Ends the threads."""
        if self._saver is not None:
            self._saver.close()
        if self.role is ECConnectorRole.SCHEDULER:
            self._prefetcher.close()
            self._hashers.shutdown(wait=False, cancel_futures=True)
        self._cache.close()


def _check(vllm_config: VllmConfig, fingerprint: str | None) -> None:
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        raise ConfigError("RedisECConnector needs a multimodal model")
    if multimodal.mm_processor_cache_type == "shm" and multimodal.mm_processor_cache_gb:
        raise ConfigError(
            "with --mm-processor-cache-type shm the scheduler does not see what is encoded; "
            "leave it at lru, or set --mm-processor-cache-gb 0"
        )
    if vllm_config.load_config.load_format == "dummy" and fingerprint is None:
        raise ConfigError("dummy weights have no identity; set ec_connector_extra_config.fingerprint")


def _embedding_fields(model: Any) -> dict[str, dict[str, str]]:
    """Fields by which a client may send an embedding instead of a picture, by modality; and the role of each."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    parser = MULTIMODAL_REGISTRY.create_processor(model).info.data_parser
    return {modality: dict(roles) for modality, roles in parser.embedding_fields.items()}


def _first_rank() -> bool:
    """All tensor-parallel ranks hold the same encoder outputs; one saves them."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0)


def _tell(namespace: Future[Namespace]) -> None:
    if namespace.cancelled():
        return
    if (error := namespace.exception()) is not None:
        logger.error("nothing is cached, because the model's weights cannot be read: %s", error)
    else:
        logger.info("encoder outputs are shared as %s", namespace.result().embedding_key("0" * 64)[:-65])
