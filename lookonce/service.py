"""The whole service on this machine: private Redis, Ray, Serve; started in order and ended without a trace."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from lookonce.checks import check_cache, check_models, check_port
from lookonce.listening import base_url, free_port
from lookonce.loopback import ray_on_loopback
from lookonce.worker import WORKER_HOOK
from shared import metrics
from shared.cache.local import remove_unused
from shared.config import Settings
from shared.environment import temporary_environment
from shared.errors import Unavailable
from shared.local_redis import LocalRedis

Report = Callable[[str], None]

#: environment variable by which the processes of one run are known
RUN_VARIABLE = "LOOKONCE_RUN"
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: how long requests in work may go on after a signal, seconds
DRAIN_SECONDS = 6.0
#: a temporary folder with a longer name leaves no room for the names of Ray's sockets, of 107 bytes at most
MAX_TEMPORARY = 17

#: variables that every replica needs, set before its first import
REPLICA_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    # a replica that fails its health checks does not get to finish anything
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # how often pools tell their load, seconds; Serve's default would make autoscaling 10 s late
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}


@dataclass(frozen=True)
class Service:
    """A service that runs.

    Attributes:
        url: base URL of the endpoint.
        cache_url: URL of the embedding cache.
        settings: in force, with the port that was taken.
    """

    url: str
    cache_url: str
    settings: Settings


@contextmanager
def running(settings: Settings, report: Report = lambda _: None) -> Iterator[str]:
    """Runs the service for the length of a ``with`` block; as :func:`service`, yields the base URL."""
    with service(settings, report) as own:
        yield own.url


@contextmanager
def service(settings: Settings, report: Report = lambda _: None) -> Iterator[Service]:
    """Runs the service for the length of a ``with`` block.

    Args:
        settings: the whole tree; ``http.port`` 0 takes a free port.
        report: called with a sentence at every step.

    Raises:
        ConfigError, CheckpointError: a model that cannot be served, a port that is taken, or a Redis Cluster.
        Unavailable: a replica that could not start.
    """
    if settings.http.port == 0:
        settings = settings.model_copy(
            update={"http": settings.http.model_copy(update={"port": free_port(settings.http.host)})}
        )
    check_models(settings)
    check_port(settings.http.host, settings.http.port)
    check_cache(settings)
    with ExitStack() as stack:
        stack.callback(remove_unused)  # last: Ray kills replicas, which then cannot leave their node's tier
        folder = _run_folder(stack)
        cache_url = settings.cache.url or _private_redis(stack, settings, folder, report)
        _start_ray(stack, settings, folder, report)
        _start_serve(stack, settings, cache_url, report)
        yield Service(base_url(settings.http.host, settings.http.port), cache_url, settings)
        report("Stopping")


@contextmanager
def ray_running(settings: Settings, report: Report = lambda _: None) -> Iterator[None]:
    """Runs Ray alone for the length of a ``with`` block."""
    with ExitStack() as stack:
        _start_ray(stack, settings, _run_folder(stack), report)
        yield


def _run_folder(stack: ExitStack) -> Path:
    base = tempfile.gettempdir()
    if len(base) > MAX_TEMPORARY:
        base = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="lookonce-", dir=base))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _private_redis(stack: ExitStack, settings: Settings, folder: Path, report: Report) -> str:
    report(f"Starting a private Redis ({settings.cache.private_maxmemory_mib} MiB)")
    redis = LocalRedis(folder / "redis", settings.cache.private_maxmemory_mib)
    redis.start()
    stack.callback(redis.stop)
    return redis.url


def _start_ray(stack: ExitStack, settings: Settings, folder: Path, report: Report) -> None:
    import ray
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    prometheus = folder / "prometheus"
    prometheus.mkdir()
    environment = REPLICA_ENVIRONMENT | {metrics.MULTIPROC_DIR: str(prometheus)}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's workers run at niceness 15 by default: any other process on the machine would starve the service
    os.environ.setdefault("RAY_worker_niceness", "0")
    for name, value in REPLICA_ENVIRONMENT.items():
        if name.startswith("RAY_SERVE_"):  # read once, when Serve is imported
            os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    # "token authentication is enabled" is good news that nobody asked for
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    address = settings.ray.address
    report(f"Connecting to Ray at {address}" if address else "Starting Ray")
    private = (
        {}
        if address
        else {
            "num_cpus": settings.ray.num_cpus,
            "object_store_memory": settings.ray.object_store_mib << 20,
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": str(folder / "ray"),
        }
    )
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    if not address:
        stack.callback(_end_leftovers, str(folder))
        temporary = folder / "tmp"  # sockets of processes that are ended before they tidy up go with the folder
        temporary.mkdir()
        # what every process of the run inherits
        stack.enter_context(temporary_environment({RUN_VARIABLE: str(folder), "TMPDIR": str(temporary)}))
        stack.enter_context(ray_on_loopback())
    else:
        # unlike ray start, ray.init does not look for the cluster's token by itself
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    ray.init(
        address=address or "local",
        namespace="lookonce",
        runtime_env={"env_vars": environment, "worker_process_setup_hook": WORKER_HOOK},
        logging_level=logging.ERROR,
        log_to_driver=settings.log.level == "debug",
        **private,
    )
    stack.callback(ray.shutdown)
    for number, handler in handlers.items():  # Ray put its own in their place, which abort the process
        signal.signal(number, handler)


def _start_serve(stack: ExitStack, settings: Settings, cache_url: str, report: Report) -> None:
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")  # the ingress answers HTTP itself
    stack.callback(_stop_serve, private=settings.ray.address is None)
    names = ", ".join(model.name for model in settings.models)
    report(f"Loading {names}: towers into the encoder pool, language models into vLLM")
    deploy(settings, cache_url)


def deploy(settings: Settings, cache_url: str, front: Settings | None = None) -> None:
    """Gives Serve the application, for the first time or with other settings, and waits until it runs.

    Args:
        settings: of the pools.
        cache_url: URL of the embedding cache.
        front: of the ingress, where they are others.

    Raises:
        Unavailable: replicas did not start; those of earlier settings go on.
    """
    from ray import serve

    from lookonce.application import APPLICATION, build

    try:
        serve.run(build(settings, cache_url, front), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise Unavailable(f"the service did not start: {_replica_error(APPLICATION)}") from error


def _stop_serve(*, private: bool) -> None:
    """Ends the application; on a private Ray within :data:`DRAIN_SECONDS`, since what is left dies with it."""
    from ray import serve

    from lookonce.application import APPLICATION
    from lookonce.door import close_all

    # deleting the application is enough: shutting Serve itself down prints faults of the controller that it kills
    drain = threading.Thread(target=serve.delete, args=(APPLICATION,), name="drain", daemon=True)
    drain.start()
    drain.join(DRAIN_SECONDS if private else None)
    if not private:  # with a private Ray it ends anyway
        close_all()


def _end_leftovers(marker: str) -> None:
    """Ends what outlived its parent: vLLM's engines and the helpers of Ray's dashboard notice that only after a moment.

    Args:
        marker: value of :data:`RUN_VARIABLE` in the environment of every process of the run.
    """
    leftovers = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(RUN_VARIABLE) == marker:
                process.kill()
                leftovers.append(process)
    psutil.wait_procs(leftovers, timeout=3)


def _replica_error(application: str) -> str:
    """What the first replica that could not start said last."""
    from ray import serve

    deployments = serve.status().applications[application].deployments
    messages = [
        line
        for status in deployments.values()
        if "Traceback" in status.message
        for line in status.message.strip().splitlines()
        if line.strip() and not line.startswith(" ")
    ]
    return messages[-1] if messages else "a replica failed; set log.level to debug to see its output"


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes SIGTERM end a ``with`` block like Ctrl-C, and lets the clean-up finish whatever else comes."""

    def interrupt(_: int, __: FrameType | None) -> None:
        for ignored in ENDING_SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in ENDING_SIGNALS}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
