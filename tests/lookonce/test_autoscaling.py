"""The autoscaling policies as arithmetic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lookonce.autoscaling import UNKNOWN_IMAGE, EncoderPolicy, LanguagePolicy, encoder_replicas, language_replicas


def test_no_work_wants_no_replica() -> None:
    """A1: anything above 0 would keep one alive for ever."""
    assert encoder_replicas({"a": 0, "b": 0}, {"a": 0, "b": 0}, 0, target=100) == 0
    assert language_replicas({"a": 0}, {"a": 0}, 0, 8, 0.8) == 0


def test_the_encoder_counts_patches_not_requests() -> None:
    one_large = encoder_replicas({"a": 4000, "b": 0}, {"a": 1, "b": 0}, 0, target=1000)
    many_small = encoder_replicas({"a": 200, "b": 200}, {"a": 20, "b": 20}, 0, target=1000)
    assert (one_large, many_small) == (4, 0.4)


def test_what_waits_for_a_place_counts_as_the_average_image() -> None:
    assert encoder_replicas({"a": 500}, {"a": 5}, queued=5, target=500) == 2
    assert encoder_replicas({"a": 0}, {"a": 0}, queued=2, target=UNKNOWN_IMAGE) == 2


def test_the_language_pool_follows_the_scarcer_of_the_two() -> None:
    assert language_replicas({"a": 16, "b": 8}, {"a": 0.1, "b": 0.1}, 0, 8, 0.8) == 3
    assert language_replicas({"a": 2, "b": 2}, {"a": 0.8, "b": 0.8}, 0, 8, 0.4) == pytest.approx(4)
    assert language_replicas({"a": 8}, {"a": 0.0}, queued=8, target_requests=8, target_kv_use=0.8) == 2


@pytest.mark.parametrize("policy", [EncoderPolicy(100), LanguagePolicy(8, 0.8)])
def test_pools_that_have_not_reported_stay_as_they_are(policy: EncoderPolicy | LanguagePolicy) -> None:
    """A replica that has just started is not idle."""
    context = SimpleNamespace(aggregated_metrics={}, target_num_replicas=3, total_queued_requests=0.0)
    assert policy(context) == (3, {})  # type: ignore[arg-type]


def test_policies_read_what_replicas_report() -> None:
    encoder = {"images": {"x": 2.0}, "patches": {"x": 600.0}}
    context = SimpleNamespace(aggregated_metrics=encoder, target_num_replicas=1, total_queued_requests=1.0)
    assert EncoderPolicy(300)(context) == (3, {})  # type: ignore[arg-type]
    language = {"requests": {"x": 12.0}, "kv_use": {"x": 0.2}}
    context = SimpleNamespace(aggregated_metrics=language, target_num_replicas=1, total_queued_requests=4.0)
    assert LanguagePolicy(8, 0.8)(context) == (2, {})  # type: ignore[arg-type]
