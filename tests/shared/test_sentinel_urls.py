"""URLs with Sentinels: every part is read, and what is missing is named."""

from __future__ import annotations

import pytest

from shared.cache import EmbeddingCache
from shared.cache.sentinels import Place, read_sentinel_url
from shared.config import CacheSettings
from shared.errors import ConfigError


def test_every_part_of_the_url_is_read() -> None:
    found = read_sentinel_url(
        "rediss+sentinel://us%40er:p%3Aw@one,two:1,[::1]:2/a%20b/3?sentinel_username=x&sentinel_password=y%26&ssl_check_hostname=no"
    )
    assert found is not None
    assert found.sentinels == (Place("one", 26379), Place("two", 1), Place("::1", 2))
    assert (found.service, found.credentials) == ("a b", {"username": "x", "password": "y&"})
    assert found.server == "rediss://us%40er:p%3Aw@master/3?ssl_check_hostname=no"
    assert read_sentinel_url("redis://one,two:1/0") is None


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://one:26379",
        "redis+sentinel://one:26379/",
        "redis+sentinel:///embeddings",
        "redis+sentinel://one,,two/embeddings",
        "redis+sentinel://one:port/embeddings",
        "redis+sentinel://one/embeddings/nought",
        "redis+sentinel://one/embeddings?colour=red",
        "sentinel://one:26379/embeddings",
    ],
)
def test_urls_that_cannot_be_used_are_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.url"):
        EmbeddingCache(CacheSettings(), url)
